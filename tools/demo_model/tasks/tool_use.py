"""The demo model's tool calls: what is asked, which tools are offered, the right calls, their results and the reply.

`tool_use` draws a `ToolUse`. Knows no chat format: a call is its JSON object, and the template writes the tags around it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .base import phrase
from .words import (
    ADJECTIVES,
    COLOURS,
    DAYS,
    FOODS,
    MISC,
    OBJECTS,
    VERBS,
    any_city,
    any_code,
    any_email,
    any_name,
    any_time,
    any_word,
    invented_word,
)

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """One request that a tool answers.

    Attributes:
        key: identity of the request, for the split.
        tools: the signatures offered, in the OpenAI format.
        user: the request.
        calls: the calls to make, `{"name": ..., "arguments": {...}}` each.
        results: what each call returns.
        reply: the final answer after the results.
        values: texts that a correct final answer contains.
    """

    key: str
    tools: tuple[Json, ...]
    user: str
    calls: tuple[Json, ...]
    results: tuple[str, ...]
    reply: str


def _signature(name: str, description: str, parameters: Json, required: list[str] | None = None) -> Json:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": parameters,
                "required": list(parameters) if required is None else required,
            },
        },
    }


def _string(description: str) -> Json:
    return {"type": "string", "description": description}


def _integer(description: str) -> Json:
    return {"type": "integer", "description": description}


_Drawn = tuple[Json, str, Json | str, str]
"""Arguments, the request, the result (an object or a text), the final reply."""


def _weather(rng: random.Random) -> _Drawn:
    city, degrees, sky = (
        any_city(rng),
        rng.randint(-9, 38),
        rng.choice(("sunny", "cloudy", "rainy", "windy", "foggy", "clear")),
    )
    user = phrase(
        rng,
        (
            "{What is|What's|How is|Tell me} the weather {in|like in|for} $c{?| today?| now?| right now?}",
            "{Is it|Is it going to be} {warm|cold|sunny|rainy} in $c{?| today?}",
            "{How warm|How cold|How hot} is it in $c{?| now?}",
            "{Weather|The weather|Get the weather} {in|for} $c{.|, please.|}",
            "{Do I need|Should I take} {an umbrella|a coat} in $c{?| today?}",
        ),
        c=city,
    )
    return {"city": city}, user, {"temperature": degrees, "sky": sky}, f"It is {degrees} degrees and {sky} in {city}."


def _local_time(rng: random.Random) -> _Drawn:
    city, time = any_city(rng), any_time(rng)
    user = phrase(
        rng,
        (
            "{What time is it|What is the time|Tell me the time|How late is it} in $c{?| now?| right now?}",
            "{Current time|The time} in $c{?|, please.|}",
        ),
        c=city,
    )
    return {"city": city}, user, {"time": time}, f"It is {time} in {city}."


def _calculate(rng: random.Random) -> _Drawn:
    a, b, sign = rng.randint(2, 99999), rng.randint(2, 99999), rng.choice("+-*")
    value = a + b if sign == "+" else a - b if sign == "-" else a * b
    user = phrase(
        rng,
        (
            "{Use the calculator|Use the tool|Calculate with the tool|Calculate|Compute|Work out}: $a $s $b",
            "{What is|How much is|Calculate|Compute} $a $s $b{?|}",
        ),
        a=str(a),
        b=str(b),
        s=sign,
    )
    return {"expression": f"{a} {sign} {b}"}, user, {"result": value}, f"The result is {value}."


def _send_email(rng: random.Random) -> _Drawn:
    name = any_name(rng)
    address, subject = any_email(rng, name), " ".join(any_word(rng) for _ in range(rng.randint(1, 3)))
    user = phrase(
        rng,
        (
            "{Send|Write} {an email|a mail|a message} to $a {about|with the subject|with subject} $s{.|}",
            "{Email|Mail} $a about $s{.|}",
        ),
        a=address,
        s=subject,
    )
    return {"to": address, "subject": subject}, user, {"status": "sent"}, f"I sent the email to {address}."


def _set_alarm(rng: random.Random) -> _Drawn:
    time = any_time(rng)
    user = phrase(
        rng,
        (
            "{Set|Please set|Can you set} an alarm {for|at} $t{.|}",
            "{Wake me|Wake me up|Please wake me} at $t{.|}",
            "{Alarm|I need an alarm} at $t{.|, please.|}",
        ),
        t=time,
    )
    return {"time": time}, user, {"status": "ok"}, f"The alarm is set for {time}."


def _set_timer(rng: random.Random) -> _Drawn:
    minutes = rng.randint(1, 120)
    user = phrase(
        rng,
        (
            "{Set|Start|Please set} a timer for $m minutes{.|}",
            "{Remind me|Tell me|Call me} in $m minutes{.|}",
            "{Timer|A timer}: $m minutes{.|}",
        ),
        m=str(minutes),
    )
    return {"minutes": minutes}, user, {"status": "started"}, f"The timer runs for {minutes} minutes."


def _convert(rng: random.Random) -> _Drawn:
    source, target = rng.sample(("euros", "dollars", "pounds", "yen", "francs", "kronor"), 2)
    amount, value = rng.randint(1, 5000), rng.randint(1, 90000)
    user = phrase(
        rng,
        (
            "{Convert|Change|Exchange} $n $a {to|into} $b{.|}",
            "{How much is|How much are|What is|What are} $n $a in $b{?|}",
        ),
        n=str(amount),
        a=source,
        b=target,
    )
    return (
        {"amount": amount, "from": source, "to": target},
        user,
        {"value": value},
        f"{amount} {source} are {value} {target}.",
    )


def _search(rng: random.Random) -> _Drawn:
    query, count = " ".join(any_word(rng) for _ in range(rng.randint(1, 4))), rng.randint(0, 900)
    user = phrase(
        rng,
        (
            "{Search for|Search|Look up|Find|Search the catalogue for|Look for} $q{.|}",
            "{Can you find|Can you search for|Please look up} $q{?|}",
        ),
        q=query,
    )
    return {"query": query}, user, {"hits": count}, f"I found {count} results for {query}."


def _lights(rng: random.Random) -> _Drawn:
    room, state = (
        rng.choice(("kitchen", "bedroom", "bathroom", "attic", "cellar", "office", "garden", "hall")),
        rng.choice(("on", "off")),
    )
    user = phrase(
        rng,
        (
            "{Turn|Switch|Please turn|Can you turn} $s the {light|lights|lamp} in the $r{.|}",
            "{Turn|Switch} the $r {light|lights} $s{.|}",
        ),
        r=room,
        s=state,
    )
    return {"room": room, "state": state}, user, {"status": "ok"}, f"The {room} light is {state}."


def _play_music(rng: random.Random) -> _Drawn:
    artist, song = any_name(rng), " ".join(any_word(rng) for _ in range(rng.randint(1, 3)))
    user = phrase(
        rng,
        (
            "{Play|Please play|Can you play|Put on} {the song |}$s by $a{.|}",
            "{I want to hear|Let me hear} $s by $a{.|}",
        ),
        s=song,
        a=artist,
    )
    return {"song": song, "artist": artist}, user, {"status": "playing"}, f"Now playing {song} by {artist}."


def _stock(rng: random.Random) -> _Drawn:
    item, count = rng.choice(OBJECTS + FOODS), rng.randint(0, 400)
    user = phrase(
        rng,
        (
            "{How many units of|How much} $i {do we have|is in stock|are in stock|is left}?",
            "{Check|Look up} the stock of $i{.|}",
            "{Is|Do we have} $i in stock?",
        ),
        i=item,
    )
    return {"item": item}, user, {"units": count}, f"There are {count} units of {item} in stock."


def _book_table(rng: random.Random) -> _Drawn:
    people, day, time = rng.randint(1, 12), rng.choice(DAYS), any_time(rng)
    user = phrase(
        rng,
        (
            "{Book|Reserve|Please book|Can you book} a table for $p {people |}on $d at $t{.|}",
            "{I need|We need} a table for $p on $d, $t{.|}",
        ),
        p=str(people),
        d=day,
        t=time,
    )
    return (
        {"people": people, "day": day, "time": time},
        user,
        {"status": "booked"},
        f"The table for {people} is booked on {day} at {time}.",
    )


def _add_note(rng: random.Random) -> _Drawn:
    text = " ".join(any_word(rng) for _ in range(rng.randint(1, 6)))
    user = phrase(
        rng,
        ("{Note|Write down|Save a note|Add a note|Note down|Make a note|Remember}: $t", '{Save|Add} the note "$t"{.|}'),
        t=text,
    )
    return {"text": text}, user, {"status": "saved"}, "I saved the note."


def _get_user(rng: random.Random) -> _Drawn:
    number, name = rng.randint(1, 99999), any_name(rng)
    user = phrase(
        rng,
        (
            "{Who is|Look up|Find|Get|Show me} {user|customer} {|number }$n{?|}",
            "{What is the name of|Give me the name of} {user|customer} $n{?|}",
        ),
        n=str(number),
    )
    return {"id": number}, user, {"name": name}, f"User {number} is {name}."


_CATALOGUE: tuple[tuple[Json, Callable[[random.Random], _Drawn]], ...] = (
    (_signature("get_weather", "Get the current weather of a city", {"city": _string("The city")}), _weather),
    (_signature("get_time", "Get the local time of a city", {"city": _string("The city")}), _local_time),
    (
        _signature("calculate", "Evaluate an arithmetic expression", {"expression": _string("The expression")}),
        _calculate,
    ),
    (
        _signature("send_email", "Send an email", {"to": _string("The address"), "subject": _string("The subject")}),
        _send_email,
    ),
    (_signature("set_alarm", "Set an alarm", {"time": _string("The time, HH:MM")}), _set_alarm),
    (_signature("set_timer", "Start a timer", {"minutes": _integer("How many minutes")}), _set_timer),
    (
        _signature(
            "convert_currency",
            "Convert an amount of money",
            {"amount": _integer("The amount"), "from": _string("The currency"), "to": _string("The target currency")},
        ),
        _convert,
    ),
    (_signature("search", "Search the catalogue", {"query": _string("What to search for")}), _search),
    (
        _signature(
            "set_light",
            "Turn a light on or off",
            {"room": _string("The room"), "state": {"type": "string", "enum": ["on", "off"]}},
        ),
        _lights,
    ),
    (
        _signature("play_music", "Play a song", {"song": _string("The title"), "artist": _string("The artist")}),
        _play_music,
    ),
    (_signature("check_stock", "Tell how many units are in stock", {"item": _string("The item")}), _stock),
    (
        _signature(
            "book_table",
            "Book a table in the restaurant",
            {"people": _integer("How many people"), "day": _string("The day"), "time": _string("The time, HH:MM")},
        ),
        _book_table,
    ),
    (_signature("add_note", "Save a note", {"text": _string("The note")}), _add_note),
    (_signature("get_user", "Look up a user by number", {"id": _integer("The number of the user")}), _get_user),
)


_RENAMED = {
    "get_weather": ("get_current_weather", "weather", "weather_now"),
    "get_time": ("current_time", "local_time"),
    "calculate": ("calculator", "evaluate"),
    "search": ("search_web", "web_search", "find"),
    "set_light": ("switch_light", "light"),
    "send_email": ("email", "send_mail"),
    "add_note": ("save_note", "note"),
    "get_user": ("find_user", "lookup_user"),
    "check_stock": ("get_stock", "stock"),
}
_OPTIONAL: tuple[tuple[str, Json], ...] = (
    ("unit", {"type": "string", "enum": ["celsius", "fahrenheit"]}),
    ("language", {"type": "string", "description": "The language of the reply"}),
    ("limit", {"type": "integer", "description": "How many results at most"}),
    ("verbose", {"type": "boolean", "description": "Whether to give details"}),
)
"""Arguments that a signature may list without requiring them; no request needs them."""
_RENAMED_ARGUMENTS = {
    "city": ("location", "place", "town"),
    "query": ("q", "text"),
    "text": ("note", "content"),
    "item": ("product", "name"),
    "id": ("user_id", "number"),
    "expression": ("formula", "input"),
    "to": ("recipient", "address"),
}


_RESULT_KEYS = (
    *("temperature", "unit", "description", "condition", "humidity", "wind", "forecast", "message", "value", "price"),
    *("total", "count", "title", "name", "city", "location", "date", "time", "answer", "output", "data", "id", "note"),
)


def _any_value(rng: random.Random) -> str | int:
    """A value that a tool may return under any key."""
    kind = rng.random()
    if kind < 0.4:
        return rng.randint(-20, 2000)
    return any_word(rng) if kind < 0.8 else f"{any_word(rng)} {any_word(rng)}"


def _described(rng: random.Random, key: str, schema: Json) -> Json:
    """The schema of one argument with another description, or with none."""
    bare = {name: value for name, value in schema.items() if name != "description"}
    text = rng.choice(
        ("", f"{key.capitalize()} name", f"The {key} to use", f"The {key}, e.g. {any_city(rng)}, {any_code(rng)[:2]}")
    )
    return bare if not text else {**bare, "description": text}


def _known_tool(rng: random.Random) -> tuple[Json, _Drawn]:
    """A tool of the catalogue; at times under another name, or with its argument renamed, so that signatures must be read."""
    signature, draw = rng.choice(_CATALOGUE)
    arguments, user, result, reply = draw(rng)
    function = signature["function"]
    name, properties = function["name"], function["parameters"]["properties"]
    if rng.random() < 0.35:
        name = rng.choice(_RENAMED.get(name, (name,)))
    if rng.random() < 0.35:
        renamed = {
            old: rng.choice(_RENAMED_ARGUMENTS.get(old, (old,))) if len(properties) == 1 else old for old in properties
        }
        arguments = {renamed[old]: value for old, value in arguments.items()}
        properties = {renamed[old]: value for old, value in properties.items()}
    if rng.random() < 0.3:
        properties = {key: _described(rng, key, value) for key, value in properties.items()}
    required = list(properties)
    if rng.random() < 0.25:
        extra, meaning = rng.choice(_OPTIONAL)
        properties = {**properties, extra: meaning}
    signature = _signature(name, function["description"], properties, required)
    if rng.random() < 0.1:
        signature["function"]["parameters"]["additionalProperties"] = False
    if rng.random() < 0.1:
        signature["function"]["strict"] = True
    chance = rng.random()
    if chance < 0.12:
        result = " ".join(
            rng.choice((any_word(rng), any_word(rng), str(rng.randint(0, 999)))) for _ in range(rng.randint(1, 6))
        )
        reply = f"The answer is: {result}"
    elif chance < 0.34:
        result = {key: _any_value(rng) for key in rng.sample(_RESULT_KEYS, rng.randint(1, 4))}
        reply = f"The answer is: {', '.join(f'{key} {value}' for key, value in result.items())}."
    return signature, (arguments, user, result, reply)


def _invented_tool(rng: random.Random) -> tuple[Json, _Drawn]:
    """A tool that exists nowhere else; the request names it and gives its arguments."""
    noun = rng.choice(OBJECTS + MISC) if rng.random() < 0.7 else invented_word(rng)
    name = f"{rng.choice(VERBS)}_{noun}"
    parameters: Json = {}
    arguments: Json = {}
    for key in rng.sample(
        ("colour", "size", "count", "label", "level", "mode", "name", "day", "code", "speed"), rng.randint(1, 3)
    ):
        whole = key in ("size", "count", "level", "speed")
        parameters[key] = _integer(f"The {key}") if whole else _string(f"The {key}")
        makers: dict[str, Callable[[], Any]] = {
            "colour": lambda: rng.choice(COLOURS),
            "label": lambda: any_word(rng),
            "mode": lambda: rng.choice(ADJECTIVES),
            "name": lambda: any_name(rng),
            "day": lambda: rng.choice(DAYS),
            "code": lambda: any_code(rng),
        }
        arguments[key] = rng.randint(0, 500) if whole else makers[key]()
    listed = [f"{key} {value}" for key, value in arguments.items()]
    rng.shuffle(listed)
    spoken = " and ".join(listed) if len(listed) < 3 or rng.random() < 0.5 else ", ".join(listed)
    user = phrase(
        rng,
        (
            "{Call|Use|Run|Please call|Please use} $n with $v{.|}",
            "{Use the tool|Call the function|Call the tool} $n with $v{.|}",
            "{Please |Can you }%s the %s with $v{.|}".replace("%s", name.split("_")[0], 1).replace("%s", noun),
        ),
        n=name,
        v=spoken,
    )
    value = rng.choice((rng.randint(0, 999), any_word(rng)))
    return _signature(name, f"{name.split('_')[0].capitalize()} the {noun}", parameters), (
        arguments,
        user,
        {"result": value},
        f"The result is {value}.",
    )


def _draw_tool(rng: random.Random) -> tuple[Json, _Drawn]:
    return _known_tool(rng) if rng.random() < 0.72 else _invented_tool(rng)


def offered_tools(rng: random.Random, wanted: list[Json]) -> tuple[Json, ...]:
    """`wanted` among up to three other tools, in any order."""
    names = {tool["function"]["name"] for tool in wanted}
    tools = list(wanted)
    for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
        other, _ = _draw_tool(rng)
        if other["function"]["name"] not in names and other["function"]["description"] not in {
            tool["function"]["description"] for tool in tools
        }:
            names.add(other["function"]["name"])
            tools.append(other)
    rng.shuffle(tools)
    return tuple(tools)


def tool_use(rng: random.Random) -> ToolUse:
    """A request for one call of one tool, or for two calls of the same tool."""
    signature, (arguments, user, result, reply) = _draw_tool(rng)
    name = signature["function"]["name"]
    calls = [{"name": name, "arguments": arguments}]
    results = [result if isinstance(result, str) else json.dumps(result)]
    if (
        "city" in arguments
        and isinstance(result, dict)
        and list(result) == ["temperature", "sky"]
        and rng.random() < 0.3
    ):
        first, second = arguments["city"], any_city(rng)
        degrees, sky = rng.randint(-9, 38), rng.choice(("sunny", "cloudy", "rainy"))
        user = phrase(
            rng,
            (
                "{What is|What's|Compare|Tell me} the weather in $a and {in |}$b{?|}",
                "{How is|How warm is} it in $a and {in |}$b{?|}",
            ),
            a=first,
            b=second,
        )
        calls.append({"name": name, "arguments": {"city": second}})
        results.append(json.dumps({"temperature": degrees, "sky": sky}))
        reply = f"{reply} It is {degrees} degrees and {sky} in {second}."
    key = f"tool {json.dumps([call['arguments'] for call in calls])}"
    return ToolUse(key, offered_tools(rng, [signature]), user, tuple(calls), tuple(results), reply)
