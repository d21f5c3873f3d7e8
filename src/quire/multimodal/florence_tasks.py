"""The words that Florence-2 was trained with for its tasks. Users write a task's name, and behind some what it is asked of."""

from quire.errors import RequestError

REST = "{rest}"
TASKS = {
    "<CAPTION>": "What does the image describe?",
    "<DETAILED_CAPTION>": "Describe in detail what is shown in the image.",
    "<MORE_DETAILED_CAPTION>": "Describe with a paragraph what is shown in the image.",
    "<OCR>": "What is the text in the image?",
    "<OCR_WITH_REGION>": "What is the text in the image, with regions?",
    "<OD>": "Locate the objects with category name in the image.",
    "<DENSE_REGION_CAPTION>": "Locate the objects in the image, with their descriptions.",
    "<REGION_PROPOSAL>": "Locate the region proposals in the image.",
    "<CAPTION_TO_PHRASE_GROUNDING>": "Locate the phrases in the caption: {rest}",
    "<REFERRING_EXPRESSION_SEGMENTATION>": "Locate {rest} in the image with mask",
    "<REGION_TO_SEGMENTATION>": "What is the polygon mask of region {rest}",
    "<OPEN_VOCABULARY_DETECTION>": "Locate {rest} in the image.",
    "<REGION_TO_CATEGORY>": "What is the region {rest}?",
    "<REGION_TO_DESCRIPTION>": "What does the region {rest} describe?",
    "<REGION_TO_OCR>": "What text is in the region {rest}?",
}


def spell(text: str) -> str:
    """The words of the task that a text names; the text itself where it names none.
    Raises RequestError: more stands beside a task that is asked of nothing."""
    for task, words in TASKS.items():
        if task in text:
            rest = text.replace(task, "").strip()
            if rest and REST not in words:
                raise RequestError(f"the task {task} stands alone; this prompt also has {rest[:60]!r}", param="prompt")
            return words.replace(REST, rest)
    return text
