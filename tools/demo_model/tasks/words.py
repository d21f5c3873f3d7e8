"""Word lists for the demo model's tasks: names, places, things, and invented words.

Knows only lists. The tasks that use them are in `examples` and in the modules that it imports.
"""

from __future__ import annotations

import random


def listed(words: str) -> list[str]:
    """The words of `words`."""
    return words.split()


def table(pairs: str) -> dict[str, str]:
    """A dictionary out of `key=value|key=value` text; line breaks do not count."""
    return dict(pair.split("=", 1) for pair in pairs.replace("\n", "").split("|"))


FRUITS = listed("""
apple pear fig banana cherry plum grape lemon lime mango peach orange kiwi melon apricot papaya raspberry
strawberry blueberry blackberry coconut pineapple pomegranate date olive quince guava currant
""")

FOODS = listed("""
bread butter cheese rice pasta soup salad egg honey jam milk tea coffee juice water sugar salt pepper flour oil
cake cookie biscuit pie pizza sandwich potato tomato onion carrot garlic cabbage spinach pumpkin bean pea corn
mushroom cucumber lettuce radish turnip celery noodle yogurt cream chocolate
""")

ANIMALS = listed("""
cat dog cow horse sheep goat pig hen duck goose rabbit mouse rat fox wolf bear lion tiger zebra giraffe elephant
monkey camel deer moose otter seal whale dolphin shark salmon trout frog toad snake lizard turtle eagle hawk owl
crow raven robin swan penguin parrot bee ant spider beetle butterfly snail crab octopus hamster donkey squirrel
badger hedgehog kangaroo koala panda
""")

OBJECTS = listed("""
table chair lamp desk bed door window mirror clock book pen pencil paper notebook eraser ruler bag box basket
bottle cup plate bowl spoon fork knife pan pot kettle oven fridge phone camera radio screen keyboard computer
tablet printer cable battery candle match key lock coin wallet watch ring hat coat scarf glove shoe boot sock
shirt dress jacket belt button needle thread hammer nail saw drill screw ladder rope bucket broom brush towel
soap pillow blanket carpet curtain umbrella tent bicycle car bus train truck boat ship plane wheel engine bridge
piano guitar violin drum flute trumpet ball kite puzzle doll robot marble ticket stamp card letter envelope map
flag bell basin magnet
""")

NATURE = listed("""
river lake ocean sea beach island mountain hill valley forest tree leaf flower grass garden field desert rock
stone sand mud snow ice rain cloud storm wind thunder sun moon star planet sky shadow fire smoke ash wave spring
summer autumn winter morning evening night dawn dusk north south east west
""")

ADJECTIVES = listed("""
big small tall short long wide narrow deep shallow heavy light fast slow hot cold warm cool dry wet new old
young early late clean dirty quiet loud bright dark soft hard smooth rough sharp dull sweet sour bitter happy
sad calm angry brave shy kind clever lazy busy empty full rich poor strong weak simple plain fresh rare ancient
modern gentle proud polite curious honest lucky tiny huge golden silver wooden
""")

VERBS = listed("""
run walk jump swim climb sit stand sleep wake eat drink cook bake wash clean write read draw paint sing dance
play work rest look listen speak talk ask answer open close push pull carry lift throw catch build break fix cut
fold count add learn teach help find lose buy sell give take send bring wait follow lead
""")

COLOURS = listed(
    """red blue green yellow purple orange pink brown black white grey violet turquoise crimson teal maroon"""
)

MISC = listed("""
school house street city village market office library museum station airport hospital kitchen bathroom bedroom
attic cellar roof wall floor stair corner circle square triangle line point number word sentence page chapter
story song poem letter question idea plan game team friend teacher doctor farmer baker pilot painter writer
singer driver sailor soldier king queen knight wizard dragon castle tower crown sword shield arrow treasure
journey adventure secret promise wonder quire ream folio margin ink type press proof binding spine cover index
draft edition volume alphabet memory engine model token layer kernel cache batch queue server client request
stream tensor vector
hello world people love time year life hand child eye case week company group problem fact mississippi
 matrix
""")

SMALL_NUMBERS = listed("""
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen
eighteen nineteen
""")

WORDS: tuple[str, ...] = tuple(
    dict.fromkeys(
        FRUITS + FOODS + ANIMALS + OBJECTS + NATURE + ADJECTIVES + VERBS + COLOURS + MISC + SMALL_NUMBERS[:13]
    )
)

FIRST_NAMES = listed("""
Ana Ben Clara David Elena Felix Grace Hugo Iris Jonas Karin Leo Maria Nina Oscar Paula Quentin Rosa Simon Tara
Uma Victor Wendy Xavier Yara Zoe Adam Bella Carlos Diana Emil Fiona Georg Hanna Ivan Julia Kofi Lena Mateo Nora
Omar Petra Ravi Sara Tom Ulla Vera Walter Yusuf Zara Alice Bruno Chloe Daniel Eva Frank Greta Henry Ines Jack
Kira Luca Mona Noah Olga Pedro Ruth Sven Tessa Viktor Amir Bianca Cora Dario Esther Fatima Gina Hassan Ingrid
Joel Kenji Lucia Marco Naomi Otto Priya Rafael Sofia Theo Valeria Wei Yuki John Mary Peter Anna Sam Emma Max
Lisa Paul Laura Mark Sophie James Kate Robert Linda Alex Chris Nick Jane Bob
""")

CAPITALS = table("""
France=Paris|Germany=Berlin|Italy=Rome|Spain=Madrid|Portugal=Lisbon|Austria=Vienna|Poland=Warsaw
|Greece=Athens|Norway=Oslo|Sweden=Stockholm|Finland=Helsinki|Denmark=Copenhagen|Ireland=Dublin|Hungary=Budapest
|Belgium=Brussels|Switzerland=Bern|the Netherlands=Amsterdam|the Czech Republic=Prague|Iceland=Reykjavik
|Romania=Bucharest|Bulgaria=Sofia|Croatia=Zagreb|Serbia=Belgrade|Ukraine=Kyiv|Russia=Moscow|Turkey=Ankara
|Egypt=Cairo|Kenya=Nairobi|Morocco=Rabat|Ghana=Accra|Nigeria=Abuja|Ethiopia=Addis Ababa|Senegal=Dakar
|Japan=Tokyo|China=Beijing|India=New Delhi|South Korea=Seoul|Thailand=Bangkok|Vietnam=Hanoi|Indonesia=Jakarta
|the Philippines=Manila|Nepal=Kathmandu|Pakistan=Islamabad|Iran=Tehran|Iraq=Baghdad|Saudi Arabia=Riyadh
|Canada=Ottawa|Mexico=Mexico City|Cuba=Havana|Brazil=Brasilia|Argentina=Buenos Aires|Chile=Santiago|Peru=Lima
|Colombia=Bogota|Uruguay=Montevideo|Ecuador=Quito|Australia=Canberra|New Zealand=Wellington|the United Kingdom=London
|England=London|the United States=Washington, D.C.
""")

CITIES: tuple[str, ...] = tuple(sorted({city for city in CAPITALS.values() if "," not in city})) + tuple(
    listed("""
Hamburg Munich Lyon Milan Porto Seville Krakow Bergen Osaka Kyoto Mumbai Toronto Boston Chicago Seattle Denver
Austin Geneva Zurich Naples Turin Leeds Glasgow Cork Ghent Graz Lagos Sydney Perth Auckland
""")
)

COUNTRIES: tuple[str, ...] = tuple(country for country in CAPITALS if not country.startswith("the "))

JOBS = listed("""
teacher doctor nurse farmer baker pilot painter writer singer driver sailor lawyer plumber gardener carpenter
engineer librarian chef dentist waiter journalist photographer mechanic tailor florist architect programmer
printer bookbinder chemist
""")

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]

MONTHS = listed("""
January February March April May June July August September October November December
""")

TENS = ["", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]

_ONSETS = listed("""
b c d f g h j k l m n p r s t v w z br dr fl gr kl pl pr sh sk sl st th tr
""")
_VOWELS = ["a", "e", "i", "o", "u", "a", "e", "i", "o", "ai", "ea", "ou"]
_CODAS = ["", "", "", "n", "r", "l", "s", "t", "m", "k", "nd", "rt", "x"]


def number_words(number: int) -> str:
    """`number` in English words, for 0 to 99; digits beyond."""
    if number < 0 or number > 99:
        return str(number)
    if number < 20:
        return SMALL_NUMBERS[number]
    tens, ones = divmod(number, 10)
    return TENS[tens] if ones == 0 else f"{TENS[tens]}-{SMALL_NUMBERS[ones]}"


def invented_word(rng: random.Random) -> str:
    """A pronounceable word that is in no list: whoever repeats it has to copy, not remember."""
    syllables = rng.choice((1, 2, 2, 2, 3))
    return "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS) for _ in range(syllables))


def any_word(rng: random.Random) -> str:
    """A listed word mostly, an invented one at times."""
    return rng.choice(WORDS) if rng.random() < 0.8 else invented_word(rng)


def any_name(rng: random.Random) -> str:
    """A listed first name mostly, an invented one at times."""
    name = rng.choice(FIRST_NAMES) if rng.random() < 0.75 else invented_word(rng).capitalize()
    return f"{name} {rng.choice(FAMILY_NAMES)}" if rng.random() < 0.1 else name


def any_city(rng: random.Random) -> str:
    """A listed city mostly, an invented one at times."""
    return rng.choice(CITIES) if rng.random() < 0.8 else invented_word(rng).capitalize()


def plural(noun: str) -> str:
    """The regular plural of `noun` (irregular ones are not in the countable lists that call this)."""
    if noun.endswith(("s", "x", "ch", "sh", "z")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


COUNTABLE: tuple[str, ...] = tuple(
    plural(noun) for noun in FRUITS[:20] + OBJECTS[:60] + ANIMALS[:10] if noun not in ("knife", "box", "sheep", "mouse")
)
"""Things that one can have several of, in the plural."""

FAMILY_NAMES = listed("""
Smith Miller Baker Cooper Fisher Weber Novak Rossi Silva Costa Berg Lund Holm Stone Field Brook Wood Hill Moore King
Young White Brown Green Black Gray Turner Carter Mason Potter Walker Hunter Archer Page Binder Sheet Folio
""")
"""Family names, for one name in ten."""


def any_time(rng: random.Random) -> str:
    """A time of day, HH:MM."""
    return f"{rng.randint(0, 23):02d}:{rng.choice((0, 15, 30, 45, rng.randint(0, 59))):02d}"


def any_code(rng: random.Random) -> str:
    """Four to six capital letters and digits."""
    return "".join(rng.choice("ABCDEFGHKLMNPRSTUVWXYZ23456789") for _ in range(rng.randint(4, 6)))


def any_email(rng: random.Random, name: str) -> str:
    """An address for `name` at an invented place."""
    return f"{name.lower().replace(' ', '.')}@{invented_word(rng)}.{rng.choice(('org', 'com', 'net'))}"
