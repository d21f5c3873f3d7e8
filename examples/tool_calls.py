"""Lets the model call a Python function: python examples/tool_calls.py [URL]

Start the server first: quire serve
"""

import json
import sys

from openai import OpenAI

CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Computes a product of two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string"}},
            "required": ["expression"],
        },
    },
}


def calculate(expression: str) -> str:
    """The product of two numbers, for example `12 * 7`. What a model writes is not trusted: it is parsed, not evaluated."""
    left, right = expression.split("*")
    return str(int(left) * int(right))


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Prints the call that the model makes, and its answer to the function's result."""
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    messages = [{"role": "user", "content": "Use the calculator: 12 * 7"}]
    asked = client.chat.completions.create(model=model, messages=messages, tools=[CALCULATE], temperature=0)
    message = asked.choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    for call in message.tool_calls:
        result = calculate(**json.loads(call.function.arguments))
        print(f"{call.function.name}({call.function.arguments}) = {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    answered = client.chat.completions.create(model=model, messages=messages, tools=[CALCULATE], temperature=0)
    print(answered.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:2])
