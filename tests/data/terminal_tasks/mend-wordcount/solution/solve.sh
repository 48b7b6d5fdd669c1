#!/bin/bash
cat >/app/wordcount.py <<'END'
"""Print the five most frequent words of a text."""

import re
import sys
from collections import Counter


def top_words(text, n=5):
    counts = Counter(re.findall(r"[^\W\d_]+", text.lower()))
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:n]


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        for word, count in top_words(file.read()):
            print(count, word)
END
