"""An engine without a model: a scheduler, a shadow cache that holds what a real one would, and a rule for next tokens.

The cache's value at a position depends on all tokens up to there, and the next token on the value that is read back
through the block table: if anything were lost or mixed up, texts would differ from `expected`.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as List

from pagedkern.allocator import BlockAllocator, Plan, Sequence, Step, Verdict
from pagedkern.errors import OutOfBlocks
from pagedkern.scheduler import Batch, Request, Sample, Scheduler

VOCABULARY = 11


def values_of(tokens: List[int], salt: object = None) -> list[int]:
    """What the cache must hold at each position."""
    value, values = hash(salt) if salt is not None else 0, []
    for token in tokens:
        value = hash((value, token))
        values.append(value)
    return values


def next_token(value: int, sample: int) -> int:
    return hash((value, sample)) % VOCABULARY


def expected(request: Request) -> list[list[int]]:
    """The tokens of each sample, without any cache."""
    texts = []
    for index in range(len(request.samples)):
        tokens = list(request.prompt)
        new: list[int] = []
        while len(new) < request.max_tokens and not (new and new[-1] in request.eos):
            new.append(next_token(values_of(tokens + new, request.salt)[-1], index))
        texts.append(new)
    return texts


class Engine:
    def __init__(
        self,
        num_blocks: int,
        block_size: int = 4,
        *,
        num_host_blocks: int = 0,
        caching: bool = True,
        watermark: float = 0.0,
        audits: bool = True,
        **options: object,
    ) -> None:
        self.allocator = BlockAllocator(
            num_blocks, block_size, num_host_blocks=num_host_blocks, prefix_caching=caching, watermark=watermark
        )
        self.scheduler = Scheduler(self.allocator, **options)  # type: ignore[arg-type]
        self.audits = audits
        self.device: dict[int, int] = {}  # slot: value
        self.host: dict[int, int] = {}
        self.firsts: list[Request] = []  # in the order of their first tokens; n samples count once
        self.foreign: list[Sequence] = []  # sequences that are not the scheduler's
        self.forked = False  # some share blocks that are not full: what writing there takes is not foreseen
        self.num_batches = 0

    def run(self, limit: int = 5000) -> None:
        """Until every request has ended."""
        while self.scheduler.has_work:
            self.step()
            assert self.num_batches < limit, "somebody is starving"

    def run_one(self, request: Request, limit: int = 500) -> None:
        """Until this request has ended."""
        while not request.ended:
            self.step()
            assert self.num_batches < limit, "it is starving"

    def step(self) -> Batch:
        batch = self.scheduler.schedule()
        self.complete(batch, self.execute(batch))
        return batch

    def complete(self, batch: Batch, tokens: list[int], *, stopped: Collection[int] = ()) -> list[Sample]:
        ended = self.scheduler.complete(batch, tokens, stopped=stopped)
        for sample in batch.outputs:
            if len(sample.tokens) == 1 and sample.request not in self.firsts:
                self.firsts.append(sample.request)
        for sample in ended:
            assert sample.finish_reason in ("stop", "length")
            assert sample.seq is None
        if self.audits:
            self.scheduler.check()
        return ended

    def execute(self, batch: Batch) -> list[int]:
        """Carry out the moves, write, read everything back; the tokens for the outputs."""
        self.num_batches += 1
        progress = bool(batch.plans or batch.dropped) or not self.scheduler.has_work
        assert progress, "a batch that does nothing while there is work"
        admitted = [request for request, _ in batch._admitted]
        assert not ((batch.swapped_out or batch.dropped) and (batch.resumed or admitted)), (
            "room is made and taken at once"
        )
        assert {row.sample.request for row in batch.rows} >= set(admitted), "admitted before there is budget for it"
        ids = [row.sample.request.id for row in batch.rows]
        for step in batch.steps:
            assert ids[: step.num_seqs] == sorted(ids[: step.num_seqs]), "not in the order of arrival"
            del ids[: step.num_seqs]
        if admitted and not self.forked and len(self.scheduler.running) > 1:  # who is alone may take all
            prompts = [r for r in self.scheduler.running if r._prefilling]
            promised = sum(s.finish_reason is None for r in prompts for s in r.samples) - len(prompts)
            room = self.allocator.can_allocate(0, spare_blocks=promised)
            assert room is Verdict.OK, "admitted at the cost of the watermark, or of what was promised to others"
        self.move(batch)
        size, budget = self.allocator.block_size, self.scheduler._state.token_budget
        cu, lens, slots = batch.cu_seqlens_q, batch.seq_lens, batch.slot_mapping
        ids, positions = batch.token_ids, batch.positions
        assert len(ids) == len(positions) == len(slots) == batch.num_tokens == cu[-1] <= budget
        assert len(batch.rows) == len(lens) == len(cu) - 1 == batch.num_seqs == len(batch.seqs)
        table: list[list[int]] = batch.block_table.tolist() if batch.rows else []  # type: ignore[assignment]
        texts = [values_of([*s.request.prompt, *s.tokens], s.request.salt) for s, _, _ in batch.rows]
        for i, (sample, start, end) in enumerate(batch.rows):
            assert (lens[i], cu[i + 1] - cu[i]) == (end, end - start)
            assert batch.max_seqlen_q >= end - start > 0
            assert list(positions[cu[i] : cu[i + 1]]) == list(range(start, end))
            assert list(ids[cu[i] : cu[i + 1]]) == [*sample.request.prompt, *sample.tokens][start:end]
            for token in range(cu[i], cu[i + 1]):
                if slots[token] >= 0:
                    assert slots[token] == table[i][positions[token] // size] * size + positions[token] % size
                    self.device[slots[token]] = texts[i][positions[token]]
        read = {}  # at the last token of each row, through the table
        for i, (_, _, end) in enumerate(batch.rows):
            for position in range(end):
                value = self.device.get(table[i][position // size] * size + position % size)
                assert value == texts[i][position], f"row {i} reads what is not its own at position {position}"
                read[cu[i + 1] - 1] = value
        rows = batch.logits_rows
        assert len(rows) == len(batch.outputs)
        return [next_token(read[row], s.index) for row, s in zip(rows, batch.outputs, strict=True)]

    def move(self, batch: Batch | Plan) -> None:
        size = self.allocator.block_size
        where = {
            "copy": (self.device, self.device),
            "swap_out": (self.device, self.host),
            "swap_in": (self.host, self.device),
        }
        for kind, src, dst in batch.moves:
            source, target = where[kind]
            assert len(set(dst)) == len(dst)
            contents = [[source.get(s * size + i) for i in range(size)] for s in src]
            for d, values in zip(dst, contents, strict=True):
                for i, value in enumerate(values):
                    target.pop(d * size + i, None)
                    if value is not None:
                        target[d * size + i] = value

    # Sequences that are not the scheduler's.

    def hold(self, num_blocks: int) -> bool:
        """Take blocks that nobody else can use. False if they are not free."""
        try:
            self.foreign.append(self.allocator.create(num_blocks * self.allocator.block_size))
        except OutOfBlocks:
            return False
        return True

    def compute(self, prompt: List[int], salt: object = None) -> bool:
        """A foreign prompt, whose full blocks can be shared from now on. False if there is no room for it."""
        try:
            seq = self.allocator.create(prompt, salt=salt)  # type: ignore[arg-type]
        except OutOfBlocks:
            return False
        self.foreign.append(seq)
        step = self.allocator.prefill([seq])
        self.write(step, values_of(prompt, salt)[seq.num_computed_tokens :])
        self.allocator.commit(step)
        return True

    def write(self, step: Step, values: List[int]) -> None:
        """Carry out a step of one foreign sequence."""
        self.move(step)
        for slot, value in zip(step.slot_mapping, values, strict=True):
            if slot >= 0:
                self.device[slot] = value

    def pin(self, sample: Sample) -> None:
        """Keep what is cached of a sample."""
        assert sample.seq is not None
        self.foreign.append(self.allocator.pin(sample.seq))

    def fork(self, sample: Sample) -> None:
        """What is not to be done: a sequence of the scheduler gets a foreign twin."""
        assert sample.seq is not None
        self.foreign += self.allocator.fork(sample.seq)
        self.forked = True

    def let_go(self, index: int = -1) -> None:
        self.allocator.free(self.foreign.pop(index))

    def fits_alone(self, request: Request) -> bool:
        """Whether a request could take its next step if all others were preempted: tried, on a copy."""
        copy = BlockAllocator.restore(self.allocator.snapshot())
        foreign = {seq.id for seq in self.foreign}
        for seq in copy.sequences:
            if seq.id not in foreign:
                copy.free(seq)
        leader, *others = [sample for sample in request.samples if sample.finish_reason is None]
        try:
            first = copy.create([*request.prompt, *leader.tokens], salt=request.salt)
            copy.commit(copy.prefill([first]))
            forks = copy.fork(first, len(others))
            for fork in forks:
                copy.truncate(fork, len(request.prompt))
            if others and leader.tokens:
                copy.append(forks, [sample.tokens for sample in others])
        except OutOfBlocks:
            return False
        return True

    def finished(self, requests: list[Request]) -> None:
        """All have, with the right tokens, and nothing is left behind."""
        for request in requests:
            assert request.state == "finished"
            assert [sample.tokens for sample in request.samples] == expected(request), request
        allocator = self.allocator
        while self.foreign:
            self.let_go()
        assert not allocator.sequences
        assert allocator.num_free_blocks == allocator.num_blocks
        assert allocator.num_free_host_blocks == allocator.num_host_blocks


def prompt_of(length: int, kind: int = 0) -> list[int]:
    """Prompts of one kind begin alike."""
    return [(kind * 7 + i * i) % VOCABULARY for i in range(length)]
