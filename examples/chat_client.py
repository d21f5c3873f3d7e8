"""Talks to a running server; answers stream: python examples/chat_client.py [URL]

Start the server first: quire serve
"""

import sys

from openai import OpenAI

QUESTIONS = ["My name is Ada.", "What is my name?"]


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Prints a short conversation."""
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    messages = []
    for question in QUESTIONS:
        print("user:", question)
        messages.append({"role": "user", "content": question})
        print("assistant: ", end="")
        answer = ""
        for chunk in client.chat.completions.create(model=model, messages=messages, temperature=0, stream=True):
            text = chunk.choices[0].delta.content or ""
            answer += text
            print(text, end="", flush=True)
        print()
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main(*sys.argv[1:2])
