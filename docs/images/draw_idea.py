"""Draws idea.svg, the README's picture, beside this file: python docs/images/draw_idea.py. A test compares the two."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "pictures"))  # it is run as a script
from canvas import Canvas

EMPTY, CELL, BLOCK, LEFT = "paper dashed", 15, 4, 156
POOL = [  # of each block: the colour of its tokens, how many there are, a word on it
    ("both", 4, "shared"),
    ("", 0, "free"),
    ("a", 3, ""),
    ("c", 4, ""),
    ("both", 4, "shared"),
    ("b", 2, ""),
    ("", 0, "free"),
    ("c", 1, ""),
]
SEQUENCES = [("sample 1", (4, 0, 2)), ("sample 2", (4, 0, 5)), ("another request", (3, 7))]


def idea() -> Canvas:
    """Sequences, their block tables, the pool that they share."""
    title = "Two samples of one prompt and another request: tokens in order, block tables, and blocks in any order"
    c = Canvas("idea", 300, title, width=760)
    for y, name, whose in (
        (46, "Sequences", "what a model sees"),
        (110, "Block tables", "kept by the allocator"),
        (222, "The cache", "read by the kernels"),
    ):
        c.text(0, y, name, "strong")
        c.text(0, y + 18, whose, "small")
    middles = [LEFT + 76 * block + 2 * CELL for block in range(len(POOL))]
    for number, (name, blocks) in enumerate(SEQUENCES):
        x = LEFT + 210 * number
        c.text(x, 22, name)
        c.cells(x, 38, CELL, [POOL[block][0] for block in blocks for _ in range(POOL[block][1])])
        for entry, block in enumerate(blocks):
            left = x + BLOCK * CELL * entry
            for edge in (left + 2, left + BLOCK * CELL - 2):
                c.line((edge, 57), (edge, 97), kind="dashed")
            c.box(left + 2, 100, BLOCK * CELL - 4, 30, POOL[block][0], str(block), "strong")
            shift = (-6, 6, 0)[number] if POOL[block][2] == "shared" else 0
            c.arrow((left + 2 * CELL, 130), (middles[block] + shift, 209))
    for block, (colour, tokens, word) in enumerate(POOL):
        c.cells(middles[block] - 2 * CELL, 212, CELL, [colour] * tokens + [EMPTY] * (BLOCK - tokens))
        c.text(middles[block], 246, str(block), "mid strong")
        c.text(middles[block], 263, word, "small mid")
    c.text(LEFT, 292, "A shared block is computed and stored once. Whoever writes into one gets a copy first.", "small")
    return c


if __name__ == "__main__":
    idea().save(Path(__file__).parent)
