"""The wordings of the generated tasks: RULER's own, the passkey's, and paraphrases, some never trained on."""

from typing import NamedTuple


class Wording(NamedTuple):
    """How a fact is stated and asked for; `{key}` and `{value}` are filled in."""

    fact: str
    question: str
    prefix: str
    """Beginning of the answer, up to the space before the value."""
    intro: str = ""
    any_value: bool = False
    """Whether values may be words and UUIDs, not only numbers."""
    many: tuple[str, str] = ("", "")
    """Question and prefix for a key with several values."""
    several: tuple[str, str] = ("", "")
    """Question and prefix for several keys at once."""

    def state(self, key: str, value: str) -> str:
        return self.fact.format(key=key, value=value)

    @property
    def many_fact(self) -> bool:
        return bool(self.many[0])


def _ruler(kind: str, question: str) -> Wording:
    plural = f"What are all the special magic {kind}s for {{key}} mentioned in the provided text?"
    prefix = f"The special magic {kind}s for {{key}} mentioned in the provided text are"
    return Wording(
        fact=f"One of the special magic {kind}s for {{key}} is: {{value}}.",
        question=question.format(kind=kind),
        prefix=f"The special magic {kind} for {{key}} mentioned in the provided text is",
        intro=f"Some special magic {kind}s are hidden within the following text. Make sure to memorize it. "
        f"I will quiz you about the {kind}s afterwards.",
        any_value=True,
        many=(plural, prefix),
        several=(plural, prefix),
    )


_ONE = "What is the special magic {kind} for {{key}} mentioned in the provided text?"
_ALL = "What are all the special magic {kind}s for {{key}} mentioned in the provided text?"

RULER = tuple(_ruler(kind, question) for question in (_ONE, _ALL) for kind in ("number", "number", "word", "uuid"))
"""RULER's (arXiv 2404.06654), asked in the singular as there, and in the plural."""

PASSKEY = Wording(
    fact="The pass key is {value}. Remember it. {value} is the pass key.",
    question="What is the pass key?",
    prefix="The pass key is",
    intro="There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there.",
)

WORDINGS = (
    Wording(
        "The secret code of the {key} is {value}.",
        "What is the secret code of the {key}?",
        "The secret code of the {key} is",
    ),
    Wording(
        "The access number for {key} is {value}.",
        "What is the access number for {key}?",
        "The access number for {key} is",
    ),
    Wording("Remember that {key} has the number {value}.", "Which number does {key} have?", "{key} has the number"),
    Wording("The pass key for {key} is {value}.", "What is the pass key for {key}?", "The pass key for {key} is"),
    Wording("The room of {key} is number {value}.", "What is the room of {key}?", "The room of {key} is number"),
    Wording("{key} was given the badge {value}.", "Which badge was {key} given?", "{key} was given the badge"),
    Wording("Call {key} at {value}.", "At which number can one call {key}?", "Call {key} at"),
    Wording(
        "The locker of {key} opens with {value}.", "What opens the locker of {key}?", "The locker of {key} opens with"
    ),
    Wording("Note: {key} = {value}.", "What is {key}?", "{key} ="),
    Wording("In the register, {key} is listed under {value}.", "Under what is {key} listed?", "{key} is listed under"),
    Wording("The account of {key} is {value}.", "Give the account of {key}.", "The account of {key} is"),
    Wording(
        "The serial number of the {key} reads {value}.", "What does the serial number of the {key} read?", "It reads"
    ),
    Wording(
        "The magic number of {key} is {value}.", "Tell me the magic number of {key}.", "The magic number of {key} is"
    ),
    Wording("Parcel {key} weighs {value} grams.", "How many grams does parcel {key} weigh?", "Parcel {key} weighs"),
    Wording(
        "The answer to the riddle of {key} is {value}.", "What is the answer to the riddle of {key}?", "The answer is"
    ),
    Wording("Agent {key} uses the password {value}.", "Which password does agent {key} use?", "The password is"),
)

HELD_OUT = (
    Wording(
        "The combination for {key} is {value}.", "What is the combination for {key}?", "The combination for {key} is"
    ),
    Wording("Ticket {value} belongs to {key}.", "Which ticket belongs to {key}?", "The ticket of {key} is"),
    Wording(
        "The winning number of {key} was {value}.",
        "What was the winning number of {key}?",
        "The winning number of {key} was",
    ),
)
"""Never trained on."""

LISTS = (
    ("", ":", "\n"),
    ("", " =", "\n"),
    ('"', '":', ",\n"),
    ("", " ->", "\n"),
    ('The value of "', '" is', ".\n"),
    ("#", " |", "\n"),
)
"""Before a key, between key and value (which begins with a space), and after the value."""

NOISE = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
"""The passkey task's haystack, repeated (arXiv 2305.16300)."""
