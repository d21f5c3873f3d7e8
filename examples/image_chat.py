"""Shows a picture to a running server and asks about it: python examples/image_chat.py [URL]

Start the server first: quire serve quire-demo-vision
"""

import base64
import io
import sys

from openai import OpenAI
from PIL import Image, ImageDraw

QUESTIONS = ["How many circles are there?", "What colour is the square?"]


def draw() -> Image.Image:
    """Three circles and a square."""
    picture = Image.new("RGB", (240, 240), "white")
    pen = ImageDraw.Draw(picture)
    for corner, colour in [((20, 20), "red"), ((150, 30), "green"), ((30, 150), "orange")]:
        pen.ellipse((*corner, corner[0] + 70, corner[1] + 70), fill=colour)
    pen.rectangle((150, 150, 215, 215), fill="blue")
    return picture


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Prints a question and its answer, for each question."""
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    file = io.BytesIO()
    draw().save(file, "PNG")
    image = {"url": "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()}
    for question in QUESTIONS:
        content = [{"type": "text", "text": question}, {"type": "image_url", "image_url": image}]
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": content}], temperature=0
        )
        print(question, answer.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:2])
