"""Print the five most frequent words of a text."""

import sys
from collections import Counter


def top_words(text, n=5):
    counts = Counter(text.split())
    return counts.most_common(n)


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        for word, count in top_words(file.read()):
            print(word, count)
