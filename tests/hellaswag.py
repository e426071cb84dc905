"""Items of HellaSwag's schema, made from real text: Python's manual, which comes with it."""

import json
import re
from pydoc_data.topics import topics

SENTENCES = [
    " ".join(sentence.split())
    for topic in sorted(topics)
    for sentence in re.split(r"(?<=\.)\s+", topics[topic])
    if 8 <= len(sentence.split()) <= 40 and len(sentence) < 180 and "[" not in sentence
]


def made_items(count):
    """Rows like those of hellaswag_val.jsonl: marks of
    WikiHow in every third, other scripts in every fourth."""
    rows = []
    step = len(SENTENCES) // (count + 1)
    for index in range(count):
        place = index * step
        words = SENTENCES[place + 1].split()
        mark = " [title] How to go on" if index % 3 == 0 else ""
        accent = "  Ünïcödé 漢字 🙂" if index % 4 == 0 else ""
        right = " ".join(words[4:]) + (" [step] Then stop." if index % 5 == 0 else "")
        others = [" ".join(SENTENCES[place + 2 + other].split()[4:]) for other in range(3)]
        label = index % 4
        first = SENTENCES[place] + mark + accent
        second = " ".join(words[:4]) if index % 7 else ""
        row = {"ind": index, "activity_label": "Reading a manual", "split": "val", "label": label}
        row |= {"ctx_a": first, "ctx_b": second, "ctx": f"{first} {second}"}
        rows.append({**row, "endings": [*others[:label], right, *others[label:]]})
    return rows


def items_file(folder, count=15):
    """A file of items, short enough for models of 16 tokens; its task is `items`."""
    choices = ["(self):", "import"]
    rows = [
        {"context": f"def {'a ' * number}", "choices": choices, "label": number % 2}
        for number in range(count)
    ]
    return str(write(folder / "items.jsonl", rows))


def write(path, rows):
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows))
    return path
