"""Dials a number and has a running server write what it hears: python examples/transcribe.py [URL]

Start the server first: quire serve quire-demo-speech
"""

import io
import sys
import wave

import numpy as np
from openai import OpenAI

RATE = 16000
ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)
"""Hertz of the two tones of a telephone's key."""


def dial(number: str) -> bytes:
    """A WAV file of the keys that are pressed for a number; a blank is a pause."""
    time, parts = np.arange(int(0.15 * RATE)) / RATE * 2 * np.pi, []
    for key in number:
        if key == " ":
            parts.append(np.zeros(int(0.3 * RATE)))
            continue
        row, column = divmod("123456789*0#".index(key), 3)
        parts += [np.sin(time * ROWS[row]) + np.sin(time * COLUMNS[column]), np.zeros(int(0.08 * RATE))]
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setparams((1, 2, RATE, 0, "NONE", ""))
        sound.writeframes((np.concatenate(parts) * 8000).astype("<i2").tobytes())
    return file.getvalue()


def main(url: str = "http://127.0.0.1:8000/v1") -> None:
    """Prints what was heard, and when."""
    client = OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    sound = ("dialled.wav", dial("40 75"))
    print(client.audio.transcriptions.create(model=model, file=sound).text)
    print(client.audio.transcriptions.create(model=model, file=sound, response_format="srt"))


if __name__ == "__main__":
    main(*sys.argv[1:2])
