"""The items of a realtime conversation: messages with texts, sounds and images, calls and their results.

They are those of `/v1/responses` but for their sounds, which are sent without a file around them.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from quire.config import limits
from quire.entrypoints.http.errors import Fields, bad_field, object_at, string_field
from quire.entrypoints.http.long_bodies import encode
from quire.entrypoints.media_parts import PlacedPart
from quire.entrypoints.realtime.sounds import SoundFormat, decode_sound
from quire.entrypoints.responses.prepare import REFERENCE, ItemTurns, normalize_item

KINDS = ("message", "function_call", "function_call_output")
ROOT = "root"


@dataclasses.dataclass
class Item:
    """An item as the client wrote it, whose sounds have this format."""

    fields: Fields
    sound: SoundFormat

    @property
    def id(self) -> str:
        return self.fields["id"]

    def is_call(self, call_id: Any) -> bool:
        """Whether it is this call."""
        return self.fields["type"] == "function_call" and self.fields.get("call_id") == call_id

    def shown(self) -> Fields:
        """What events tell of it: all but the bytes of its sounds."""
        fields = {"object": "realtime.item", "status": "completed", **self.fields}
        if fields["type"] == "message":
            parts = fields.get("content") or []
            fields["content"] = [{key: value for key, value in part.items() if key != "audio"} for part in parts]
        return fields

    def read(self, path: str = "item") -> Fields:
        """As `/v1/responses` reads it. Raises HTTPError, a 400 whose `param` is the path of what is wrong."""
        if self.fields["type"] != "message":
            return self.fields
        content = self.fields.get("content") or []
        parts = [
            self._part(object_at(part, f"{path}.content[{i}]"), f"{path}.content[{i}]")
            for i, part in enumerate(content)
        ]
        return {**self.fields, "content": parts}

    def _part(self, part: Fields, path: str) -> Fields:
        match part.get("type"):
            case "input_audio":
                field = f"{path}.audio"
                heard = self.sound.read(decode_sound(string_field(part, "audio", path), field))
                return PlacedPart({"type": "audio", "audio": heard}, path, field)
            case "output_audio":
                return {"type": "output_text", "text": part.get("transcript") or ""}
            case _:
                return part


def new_item(given: Any, sound: SoundFormat, path: str = "item") -> Item:
    """A client's item. Raises HTTPError, a 400 whose `param` is the path of what is wrong."""
    fields = normalize_item(object_at(given, path), path)
    if fields["type"] not in (*KINDS, REFERENCE):
        raise bad_field(f"{path}.type", f"{fields['type']!r} is not supported here; allowed: {', '.join(KINDS)}.")
    item = Item(fields, sound)
    if fields["type"] == "message":
        ItemTurns().add(item.read(path), path)
    return item


class Conversation:
    """Items in their order, of bounded number and size.

    Args:
        max_bytes: of all items as JSON.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._sizes: dict[str, int] = {}
        self.items: list[Item] = []

    @property
    def last_id(self) -> str | None:
        return self.items[-1].id if self.items else None

    def find(self, item_id: str | None, field: str = "item_id") -> int:
        """An item's place. Raises HTTPError, a 400: there is none."""
        for index, item in enumerate(self.items):
            if item.id == item_id:
                return index
        raise bad_field(field, f"there is no item {str(item_id)[:100]!r} in the conversation.", "item_not_found")

    def insert(self, item: Item, after: str | None = None) -> str | None:
        """Put a client's item behind another one (or `root`; None: at the end); returns what is before it now.
        Raises HTTPError, a 400: there is no such place, the id is taken, or there is no room."""
        place = 0 if after == ROOT else len(self.items) if after is None else self.find(after, "previous_item_id") + 1
        call_id = item.fields.get("call_id")
        if item.fields["type"] == KINDS[2] and not any(each.is_call(call_id) for each in self.items):
            raise bad_field("item.call_id", f"there is no function_call {str(call_id)[:100]!r} in the conversation.")
        if item.id in self._sizes:
            raise bad_field("item.id", f"there is an item {item.id[:100]!r} already.")
        size = len(encode(item.fields))
        if len(self.items) >= limits.MAX_CHAT_MESSAGES or sum(self._sizes.values()) + size > self._max_bytes:
            most = f"{limits.MAX_CHAT_MESSAGES} items and {self._max_bytes} bytes"
            message = f"the conversation would have more than {most}."
            raise bad_field("item", message, "conversation_too_large")
        self._sizes[item.id] = size
        self.items.insert(place, item)
        return self.items[place - 1].id if place else None

    def answer(self, item: Item, after: str | None) -> None:
        """Put the model's item behind another one, or at the end where that is gone."""
        ids = [each.id for each in self.items]
        self._sizes[item.id] = len(encode(item.fields))
        self.items.insert(ids.index(after) + 1 if after in ids else len(ids), item)

    def delete(self, item_id: str | None) -> None:
        """Raises HTTPError, a 400: there is none."""
        item = self.items.pop(self.find(item_id))
        del self._sizes[item.id]

    def resolve(self, given: Sequence[Item]) -> list[Item]:
        """Items in the place of references to them."""
        return [
            self.items[self.find(item.id, f"response.input[{index}].id")] if item.fields["type"] == REFERENCE else item
            for index, item in enumerate(given)
        ]
