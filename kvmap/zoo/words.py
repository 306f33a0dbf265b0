"""The words of the small world: every word the zoo's text and tokenizer know."""

from __future__ import annotations

PEOPLE = ("anna", "ben", "carla", "david", "emma", "felix", "grace", "hugo", "iris", "jonas", "katya", "leo")
PLACES = (
    "paris",
    "rome",
    "london",
    "berlin",
    "madrid",
    "oslo",
    "vienna",
    "prague",
    "athens",
    "dublin",
    "lisbon",
    "cairo",
)
COLOURS = (
    "red",
    "blue",
    "green",
    "yellow",
    "black",
    "white",
    "brown",
    "purple",
    "orange",
    "pink",
    "grey",
    "silver",
)
OBJECTS = (
    "ball",
    "book",
    "cup",
    "key",
    "lamp",
    "hat",
    "box",
    "coin",
    "drum",
    "kite",
    "rope",
    "spoon",
    "bell",
    "vase",
    "doll",
    "clock",
    "knife",
    "scarf",
    "basket",
    "mirror",
)
NUMBERS = ("zero", "one", "two", "three", "four")

FILLERS = (
    "rain fell on the roof all day .",
    "a dog barked far away .",
    "nobody said a word .",
    "the wind blew through the trees .",
    "it was a quiet morning .",
    "the sun went behind a cloud .",
    "somewhere a door closed .",
    "then it grew dark outside .",
    "birds sang in the trees .",
    "the house was warm and quiet .",
    "after lunch everyone was tired .",
    "a train passed in the night .",
)

# Every form of each sentence. {person}, {place}, {thing}, {colour} and {old} are filled in by the story.
SENTENCES: dict[str, tuple[str, ...]] = {
    "person_in": ("{person} is in {place} .", "{person} waits in {place} ."),
    "thing_in": ("the {thing} is in {place} .", "the {thing} lies in {place} ."),
    "has": ("the {thing} is with {person} .", "the {thing} belongs to {person} ."),
    "colour": ("the {thing} is {colour} .", "the colour of the {thing} is {colour} ."),
    "person_moves": (
        "{person} went to {place} .",
        "{person} left {old} for {place} .",
    ),
    "thing_moves": (
        "someone moved the {thing} to {place} .",
        "someone moved the {thing} from {old} to {place} .",
    ),
    "person_stays": ("{person} stayed in {place} .",),
    "thing_stays": ("the {thing} was still in {place} .",),
    "colour_again": ("{person} thought of the {thing} , and it was {colour} .",),
    "has_again": ("{person} still carried the {thing} .",),
}

# How a question is put and how its answer, the word that follows, is led up to.
QUESTIONS: dict[str, str] = {
    "where": "question : where is {subject} ? answer : {subject} is in",
    "colour": "question : what colour is {subject} ? answer : {subject} is",
    "holder": "question : who has {subject} ? answer : {subject} is with",
    "count": "question : how many things does {subject} have ? answer : {subject} has",
}
ANSWER_MARK = "answer"  # the word that, in any sentence, says that the sentence's last word is an answer
STOP = "."


def vocabulary() -> list[str]:
    """Every word a text of the world can hold, in a fixed order."""
    templates = [form for forms in SENTENCES.values() for form in forms]
    templates += [*FILLERS, *QUESTIONS.values()]
    plain = {word for text in templates for word in text.split() if not word.startswith("{")}
    return sorted(plain.union(PEOPLE, PLACES, COLOURS, OBJECTS, NUMBERS))
