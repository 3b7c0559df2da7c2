"""Data ranks: block tables and a scheduler for several groups of devices, each with whole weights and its own pools.

Each rank plans the rows of its running sequences. All ranks admit from one queue, and compute in one dispatch, with
one upper bound of the steps and with batches padded to one size.
"""

from collections import deque
from collections.abc import Sequence as Many

from jattn.engine.request import Sequence
from jattn.engine.scheduler import Draft, Limits, Row, Scheduler, StepPlan
from jattn.engine.tables import BlockTables

UNEVENNESS = 4
"""A sequence goes to the rank with the most of its tokens cached, unless it has at least max(max_num_seqs //
UNEVENNESS, 1) rows more than the open rank with the fewest: a step takes as long as that of the fullest rank."""


class DataRankTables:
    """The BlockTables of all data ranks, counted together."""

    def __init__(self, ranks: Many[BlockTables]):
        self.ranks = tuple(ranks)

    @property
    def pools(self) -> tuple:
        """The block pools of all ranks."""
        return tuple(pool for tables in self.ranks for pool in tables.pools)

    @property
    def usage(self) -> float:
        """The share of blocks in use in the fullest group."""
        return max(share for _, share in self.group_usage)

    @property
    def group_usage(self) -> tuple[tuple[str, float], ...]:
        """(name, share of blocks in use) of each group, in the data rank where it is the largest."""
        groups = zip(*[tables.group_usage for tables in self.ranks], strict=True)
        return tuple((group[0][0], max(share for _, share in group)) for group in groups)

    @property
    def evictions(self) -> int:
        """Cached blocks whose contents were replaced."""
        return sum(tables.evictions for tables in self.ranks)

    @property
    def weights_version(self) -> int:
        return self.ranks[0].weights_version


class DataRankScheduler:
    """Has the methods of a Scheduler; Sequence.data_rank says which rank's blocks a running sequence holds."""

    def __init__(self, limits: Limits, tables: DataRankTables):
        """limits: of each rank."""
        self.limits, self.tables = limits, tables
        self.waiting: deque[Sequence] = deque()
        self.ranks = tuple(Scheduler(limits, each, self.waiting) for each in tables.ranks)
        self._in_newest: set[int] = set()  # the ranks with rows in the newest dispatch

    @property
    def running(self) -> list[Sequence]:
        """The running sequences of all ranks."""
        return [seq for rank in self.ranks for seq in rank.running]

    def add(self, seq: Sequence) -> None:
        """As Scheduler.add. Its data rank is chosen at admission."""
        self.ranks[0].add(seq)

    def remove(self, seq: Sequence, *, trusted: bool = True) -> None:
        """As Scheduler.remove."""
        self.ranks[seq.data_rank].remove(seq, trusted=trusted)

    def commit(self, seq: Sequence, row: Row, new_tokens: Many[int]) -> None:
        """As Scheduler.commit."""
        self.ranks[seq.data_rank].commit(seq, row, new_tokens)

    def schedule(self, in_flight: bool = False) -> StepPlan:
        """As Scheduler.schedule. A rank that waits for blocks of the dispatch in flight gets no row in this one."""
        drafts = [rank.draft(in_flight and i in self._in_newest) for i, rank in enumerate(self.ranks)]
        while self.waiting and self._place(drafts):
            pass
        burst = self.ranks[0].wanted_burst([row for draft in drafts if draft is not None for row in draft.chosen])
        for rank, draft in zip(self.ranks, drafts, strict=True):
            burst = burst if draft is None else rank.reserve(draft, burst)
        pairs = zip(self.ranks, drafts, strict=True)
        plans = [StepPlan(burst=burst) if draft is None else rank.planned(draft, burst) for rank, draft in pairs]
        if any(plan.rows for plan in plans):
            self._in_newest = {i for i, plan in enumerate(plans) if plan.rows}
        return _together(plans, burst)

    def _place(self, drafts: Many[Draft | None]) -> bool:
        """Admit the next waiting sequence to the best rank that has room and blocks; False if there is none."""
        seq = self.waiting[0]
        open_ranks = [i for i, draft in enumerate(drafts) if draft is not None and self.ranks[i].may_admit(draft)]
        rows = {i: len(self.ranks[i].running) for i in open_ranks}
        most = min(rows.values(), default=0) + max(self.limits.max_num_seqs // UNEVENNESS, 1)
        hits = {i: self.tables.ranks[i].num_cached(seq) if rows[i] < most else 0 for i in open_ranks}
        held = {i: sum(pool.num_held for pool in self.tables.ranks[i].pools) for i in open_ranks}
        for i in sorted(open_ranks, key=lambda i: (-hits[i], rows[i], held[i], i)):
            draft = drafts[i]
            assert draft is not None
            if self.ranks[i].admit(draft):
                seq.data_rank = i
                return True
        return False


def _together(plans: Many[StepPlan], burst: int) -> StepPlan:
    """One plan of the ranks' plans."""
    names = "rows", "preempted", "admitted"
    joined = {name: tuple(x for plan in plans for x in getattr(plan, name)) for name in names}
    return StepPlan(**joined, burst=burst, of_ranks=tuple(plans))


Tables = BlockTables | DataRankTables
AnyScheduler = Scheduler | DataRankScheduler


def make_tables(num_ranks: int, *args, **options) -> Tables:
    """The block tables of so many data ranks, each with the arguments of BlockTables."""
    ranks = [BlockTables(*args, **options) for _ in range(num_ranks)]
    return ranks[0] if num_ranks == 1 else DataRankTables(ranks)


def scheduler_of(limits: Limits, tables: Tables) -> AnyScheduler:
    """The scheduler of these tables."""
    return Scheduler(limits, tables) if isinstance(tables, BlockTables) else DataRankScheduler(limits, tables)
