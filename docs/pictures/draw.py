"""Draws the pictures of the guides beside this file: python docs/pictures/draw.py. A test holds them against it."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # it is run as a script
from canvas import Canvas

EMPTY = "paper dashed"


def block_table() -> Canvas:
    """The idea: tokens in order, blocks anywhere, a table between them."""
    c = Canvas(
        "block_table", 332, "Ten tokens of a sequence lie in blocks 4, 0 and 3 of the cache; its block table says so"
    )
    c.text(20, 24, "What the sequence sees: its tokens, in order", "strong")
    for j in range(3):
        numbers = [str(4 * j + i) if 4 * j + i < 10 else "" for i in range(4)]
        c.cells(112 + 134 * j, 38, 29, ["a" if n else EMPTY for n in numbers], numbers)
    c.text(20, 131, "Block table", "strong")
    ids = (4, 0, 3)
    for j, block in enumerate(ids):
        middle = 170 + 134 * j
        c.arrow((middle, 69), (middle, 108))
        c.box(middle - 30, 110, 60, 32, "paper", str(block), "strong")
        c.text(middle + 36, 131, f"[{j}]", "small code")
    mine = {block: 4 - 2 * (j == 2) for j, block in enumerate(ids)}
    other = {1: 4, 5: 3}
    for block in range(6):
        x = 18 + 82 * block
        kinds = ["a" if i < mine.get(block, 0) else "b" if i < other.get(block, 0) else EMPTY for i in range(4)]
        c.cells(x, 216, 19, kinds)
        c.text(x + 38, 253, f"block {block}", "small mid")
    for j, block in enumerate(ids):
        c.arrow((170 + 134 * j, 142), (18 + 82 * block + 38, 213), bend=(-10, 8, 6)[j])
    c.box(18 + 82 * 3 + 19, 216, 19, 19, "a", "9", "strong hot")
    c.text(20, 286, "The cache: blocks of 4 tokens, in any order", "strong")
    c.text(20, 311, "Token 9: entry 9 // 4 = 2 says block 3, offset 9 % 4 = 1, slot 3 · 4 + 1 = 13", "small")
    return c


def reserved() -> Canvas:
    """Why: what a reservation for the longest case costs."""
    c = Canvas(
        "reserved",
        330,
        "A piece of memory for each request holds three requests; in blocks, more than half of it is free for others",
    )
    c.text(20, 24, "A piece for each request, as long as it may get", "strong")
    used = {"a": 5, "b": 11, "c": 3}
    for i, (kind, tokens) in enumerate(used.items()):
        c.cells(20, 38 + 34 * i, 24, [kind] * tokens + [EMPTY] * (20 - tokens))
    c.text(20, 160, "60 tokens of memory, 19 used: a fourth request waits", "small")
    c.text(20, 206, "The same memory in blocks of 4, as tokens come", "strong")
    owners = "abacbb" + "." * 9
    left = {"a": 5, "b": 11, "c": 3}
    for block in range(15):
        kind = owners[block]
        full = min(4, left.get(kind, 0))
        if kind in left:
            left[kind] -= full
        x, y = 20 + 98 * (block % 5), 220 + 30 * (block // 5)
        c.cells(x, y, 22, [kind if i < full else "hole" if kind in left else EMPTY for i in range(4)])
    c.text(20, 322, "At most one block a request is not full: 9 blocks are free for others", "small")
    return c


def _table(
    c: Canvas, x: float, y: float, name: str, kind: str, ids: list[tuple[int, str]]
) -> list[tuple[float, float]]:
    """A block table with its owner's name; returns the lower middles of its entries."""
    c.box(x, y, 92, 30, kind, name, "strong")
    for j, (block, colour) in enumerate(ids):
        c.box(x + 98 + 40 * j, y, 40, 30, colour, str(block))
    return [(x + 118 + 40 * j, y + 30) for j in range(len(ids))]


def _pool(
    c: Canvas, y: float, blocks: list[tuple[str, str]], x: float = 20, pitch: float = 98
) -> list[tuple[float, float]]:
    """A row of blocks with a note under each; returns the upper middles."""
    for i, (kinds, note) in enumerate(blocks):
        names = {"s": "both", "a": "a", "b": "b", "c": "c", ".": EMPTY}
        c.cells(x + pitch * i, y, 21, [names[k] for k in kinds])
        c.text(x + pitch * i + 42, y + 38, note, "small mid")
    return [(x + pitch * i + 42, y) for i in range(len(blocks))]


def prefix() -> Canvas:
    """Prompts that begin alike."""
    c = Canvas("prefix", 266, "Two requests that begin alike share the blocks of their beginning")
    c.text(20, 24, "Two prompts with one system prompt of 8 tokens", "strong")
    first = _table(c, 20, 40, "request 1", "a", [(0, "both"), (1, "both"), (2, "a")])
    second = _table(c, 270, 40, "request 2", "b", [(0, "both"), (1, "both"), (3, "b")])
    tops = _pool(
        c, 154, [("ssss", "0: two owners"), ("ssss", "1: two owners"), ("aaa.", "2"), ("bb..", "3"), ("....", "free")]
    )
    for start, block in zip(first, (0, 1, 2), strict=True):
        c.arrow(start, (tops[block][0] - 6, tops[block][1] - 3))
    for start, block in zip(second, (0, 1, 3), strict=True):
        c.arrow(start, (tops[block][0] + 8, tops[block][1] - 3))
    c.text(20, 226, "The system prompt is computed once. Its blocks stay after both are done,", "small")
    c.text(20, 245, "until nothing else is free: a third request finds them.", "small")
    return c


def fork() -> Canvas:
    """Copy-on-write in three pictures."""
    c = Canvas(
        "fork",
        470,
        "A fork shares all blocks; the first who writes gets a copy of the last one, the other writes in place",
    )
    shared, mine, other = [(0, "both"), (1, "both")], [(0, "both"), (2, "a")], [(0, "both"), (1, "b")]
    full = ("ssss", "0: two owners")
    stages = [
        ("1  fork: the sample shares every block, nothing is copied", shared, shared,
         [full, ("ss..", "1: two owners"), ("....", "free")], None),
        ("2  the first to write gets a copy of the shared block", mine, other,
         [full, ("bb..", "1"), ("aaa.", "2")], "copy"),
        ("3  the other is alone in it now, and writes in place", mine, other,
         [full, ("bbb.", "1"), ("aaa.", "2")], None),
    ]  # fmt: skip
    for i, (title, first, second, blocks, note) in enumerate(stages):
        y = 164 * i
        c.text(20, y + 24, title, "strong")
        _table(c, 20, y + 38, "sample 1", "a", first)
        _table(c, 270, y + 38, "sample 2", "b", second)
        tops = _pool(c, y + 90, blocks, x=40, pitch=160)
        if note:
            (x0, top), (x1, _) = tops[1], tops[2]
            c.arrow((x0 + 46, top + 11), (x1 - 46, top + 11), kind="warm")
            c.text((x0 + x1) / 2, top + 3, note, "small mid hot")
    return c


def swap() -> Canvas:
    """Two pools."""
    c = Canvas(
        "swap",
        304,
        "Blocks of a preempted request go to host memory and come back; a block that another one owns too stays",
    )
    c.text(20, 24, "GPU memory", "strong")
    c.box(12, 36, 496, 76, "hole")
    tops = _pool(
        c, 52, [("ssss", "0: stays"), ("bbbb", "1"), ("bb..", "2"), ("aaaa", "3"), ("a...", "4")], x=27, pitch=96
    )
    c.text(20, 292, "Host memory, pinned", "strong")
    c.box(12, 198, 496, 76, "hole")
    below = _pool(c, 214, [("bbbb", "0"), ("bb..", "1"), ("....", "2"), ("....", "3"), ("....", "4")], x=27, pitch=96)
    for here, there in ((1, 0), (2, 1)):
        c.arrow((tops[here][0] - 8, 114), (below[there][0] + 30, 196))
        c.arrow((below[there][0] + 46, 196), (tops[here][0] + 8, 114), kind="warm")
    c.arrow((286, 139), (322, 139))
    c.text(332, 144, "swap_out", "code")
    c.arrow((286, 165), (322, 165), kind="warm")
    c.text(332, 170, "swap_in", "code hot")
    return c


def fence() -> Canvas:
    """Why a freed block is not handed out while a step that reads it is in flight."""
    c = Canvas(
        "fence", 286, "A block that is freed while a step reads it is handed out again only after that step's commit"
    )
    c.text(20, 24, "What the engine calls", "strong")
    marks = [(70, "append"), (170, "free(B)"), (262, "create"), (372, "commit"), (458, "create")]
    for x, name in marks:
        for top, bottom in ((58, 74), (98, 150), (174, 210)):  # not across the headings
            c.line((x, top), (x, bottom), kind="dashed")
        c.text(x, 50, name, "code mid" if name != "commit" else "code mid strong")
    c.text(20, 90, "What the GPU does", "strong")
    c.box(100, 100, 262, 30, "a", "kernels of the step read B's block")
    c.text(20, 166, "B's block", "strong")
    c.box(20, 176, 150, 30, "b", "owned")
    c.box(170, 176, 202, 30, "both", "fenced: freed, not free")
    c.box(372, 176, 86, 30, EMPTY, "free")
    c.box(458, 176, 50, 30, "c", "new")
    c.text(262, 228, "gets another block", "small mid")
    c.text(458, 228, "may get this", "small mid")
    c.arrow((20, 262), (508, 262))
    c.text(264, 280, "time", "small mid")
    return c


def loop() -> Canvas:
    """Who does what in one turn of an engine's loop."""
    c = Canvas(
        "loop", 372, "One turn of an engine's loop: which calls are pagedkern's and which parts are the engine's own"
    )
    rows = [
        ("scheduler.schedule()", "who runs, in which blocks", "a"),
        ("cache.apply(batch)", "copies and swaps, on streams", "a"),
        ("your model's layers", "", "b"),
        ("write_kv(k, v, …)", "new K and V to their slots", "a"),
        ("paged_attention(q, …)", "reads K and V through the table", "a"),
        ("your sampler", "one token a sequence", "b"),
        ("scheduler.complete(…)", "it has run: blocks may be shared", "a"),
    ]
    for i, (call, does, kind) in enumerate(rows):
        x, y = 60 + 22 * (i in (3, 4)), 14 + 44 * i
        c.box(x, y, 224 - 22 * (i in (3, 4)), 32, kind, call, "code" if kind == "a" else "strong")
        c.text(296, y + 21, does, "small")
        if i:
            c.arrow((x + 18, y - 12), (x + 18, y))
    c.box(52, 96, 240, 128, "dashed")
    c.line((60, 294), (30, 294), (30, 30), kind="arrow")
    c.arrow((30, 30), (58, 30))
    c.box(60, 336, 20, 20, "a")
    c.text(88, 351, "pagedkern", "small")
    c.box(186, 336, 20, 20, "b")
    c.text(214, 351, "your engine", "small")
    return c


def life() -> Canvas:
    """The states of a block."""
    c = Canvas("life", 300, "A block is blank, owned or idle: what a call makes of it")
    c.box(196, 30, 128, 48, "a")
    c.text(260, 51, "owned", "mid strong")
    c.text(260, 69, "by one or more", "mid small")
    c.box(16, 200, 128, 48, EMPTY)
    c.text(80, 221, "blank", "mid strong")
    c.text(80, 239, "free", "mid small")
    c.box(376, 200, 128, 48, "both")
    c.text(440, 221, "idle", "mid strong")
    c.text(440, 239, "free, still cached", "mid small")
    c.arrow((66, 198), (206, 81), bend=-18)
    c.text(16, 118, "create, append", "small")
    c.arrow((238, 81), (104, 198), bend=-10)
    c.text(162, 166, "free,", "small")
    c.text(162, 183, "not cached", "small")
    c.arrow((314, 81), (454, 198), bend=-18)
    c.text(416, 102, "free, cached:", "small")
    c.text(416, 119, "its last owner", "small")
    c.arrow((416, 198), (282, 81), bend=-10, kind="warm")
    c.text(258, 166, "create finds", "small hot")
    c.text(258, 183, "its prefix", "small hot")
    c.arrow((374, 232), (147, 232))
    c.text(260, 252, "evicted: none is blank,", "small mid")
    c.text(260, 269, "this is the oldest", "small mid")
    return c


def requests() -> Canvas:
    """The states of a request."""
    c = Canvas(
        "requests", 270, "A request waits, runs and finishes; when blocks are lacking, who came last is preempted"
    )
    for x, name, kind in ((16, "waiting", "hole"), (200, "running", "a"), (384, "finished", "c")):
        c.box(x, 40, 120, 44, kind, name, "strong")
    c.arrow((138, 62), (197, 62))
    c.arrow((322, 62), (381, 62))
    c.text(16, 24, "add", "code")
    c.text(16, 106, "admitted when there are blocks", "small")
    c.text(16, 123, "for its prompt, the watermark", "small")
    c.text(16, 140, "kept; nobody overtakes", "small")
    c.box(200, 196, 120, 44, "b", "preempted", "strong")
    c.arrow((248, 87), (248, 193))
    c.arrow((274, 193), (274, 87), kind="warm")
    c.text(240, 166, "blocks are lacking for those", "small end")
    c.text(240, 183, "before it, it came last", "small end")
    c.text(284, 126, "there is room again: before", "small hot")
    c.text(284, 143, "anybody is admitted", "small hot")
    c.text(332, 214, "swapped out, or dropped", "small")
    c.text(332, 231, "and computed again", "small")
    return c


LAYERS = (  # name, what it is for, colour, left, width, row, rows
    ("gpucheck", "one report on a GPU", "c", 16, 300, 0, 1),
    ("autotune", "measures, chooses, reports", "c", 16, 300, 1, 1),
    ("integrations", "models of others", "c", 326, 142, 0, 2),
    ("cache", "the tensors: carries out what plans ask for", "a", 16, 452, 2, 1),
    ("ops", "checks once, chooses, launches", "a", 16, 300, 3, 1),
    ("scheduler", "who runs next", "a", 326, 142, 3, 1),
    ("backends", "the kernels, each in a room of its own", "b", 16, 300, 4, 1),
    ("allocator", "whose block is it", "b", 326, 142, 4, 1),
    ("abi", "what a batch is: the C header, its mirror, checks", "both", 16, 452, 5, 1),
    ("errors", "what can go wrong", "hole", 16, 452, 6, 1),
)


def layers() -> Canvas:
    """The parts of the library; imports go down."""
    c = Canvas("layers", 408, "The parts of the library in layers: imports go downward only")
    for name, does, colour, x, w, row, rows in LAYERS:
        y, h = 10 + 56 * row, 56 * rows - 10
        c.box(x, y, w, h, colour)
        c.text(x + w / 2, y + h / 2 - 3, name, "mid strong code")
        c.text(x + w / 2, y + h / 2 + 15, does, "mid small")
    c.arrow((492, 12), (492, 392), kind="warm")
    c.text(506, 202, "imports", "small hot down")
    return c


PICTURES = (block_table, reserved, prefix, fork, swap, fence, life, requests, loop, layers)


def main() -> None:
    for draw in PICTURES:
        draw().save(Path(__file__).parent)


if __name__ == "__main__":
    main()
