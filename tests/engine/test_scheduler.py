"""The scheduler and its block tables with a simulated cache: thousands of operations, without a device."""

import random
import time
from collections import Counter

import pytest

from jattn.engine import Limits, SamplingParams, Sequence, StepPlan
from jattn.engine.data_ranks import make_tables, scheduler_of
from jattn.engine.tables import BlockTables, first_visible, max_blocks_of_group
from tests.engine.fake import Group

FULL, WINDOW, CHUNK = Group((0,)), Group((1,), sliding_window=5), Group((2,), chunk_size=8)
S = 4
END = 19


class World:
    """A scheduler, and the contents of each slot: its token and all tokens before it."""

    def __init__(
        self, groups, *, num_blocks=14, max_num_seqs=4, budget=12, burst=3, prefix_caching=True, seed=0, sized=False,
        data_ranks=1,
    ):  # fmt: skip
        most = [max_blocks_of_group(group, S, max_num_seqs, budget, burst) for group in groups] if sized else []
        pools = [min(num_blocks, n + 1) if n else num_blocks for n in most] or [num_blocks] * len(groups)
        self.tables, self.groups = make_tables(data_ranks, pools, S, groups, prefix_caching), groups
        self.longest = (num_blocks - 1) * S
        self.scheduler = scheduler_of(Limits(max_num_seqs, budget, self.longest, burst), self.tables)
        self.held = [{} for _ in range(data_ranks * len(groups))]  # of each group of each rank
        self.seqs, self.finished, self.rng, self.made = {}, {}, random.Random(seed), 0
        self.plans, self.flights, self.ahead, self.newest = [], [], {}, StepPlan()

    def add(self, prompt=None, max_tokens=None, salt=b""):
        shared = [1, 2, 3, 4, 5, 6, 7, 8, 9][: self.rng.randint(0, 9)]
        prompt = prompt or shared + [self.rng.randrange(END) for _ in range(self.rng.randint(1, 9))]
        params = SamplingParams(max_tokens=max_tokens or self.rng.randint(1, 20))
        seq = Sequence(str(self.made), tuple(prompt), params, root_hash=salt)
        self.made += 1
        self.seqs[seq.id] = seq
        self.scheduler.add(seq)
        return seq

    def fork(self):
        """Another sequence, with the tokens of a running one and one more."""
        if self.seqs:
            tokens = self.rng.choice(list(self.seqs.values())).tokens
            if len(tokens) < self.longest - 1:
                self.add([*tokens, self.rng.randrange(END)])

    def abort(self):
        if self.seqs:
            self.scheduler.remove(self.seqs.pop(self.rng.choice(list(self.seqs))))

    def step(self):
        """Plan and compute a dispatch, and read it."""
        plan = self.send()
        while self.flights:
            self.read()
        return plan

    def step_ahead(self):
        """Plan and compute the next dispatch before this one is read, as the engine does."""
        while len(self.flights) < 2 and self.send().rows:
            pass
        if self.flights:
            self.read()

    def send(self):
        plan = self.scheduler.schedule(in_flight=bool(self.flights))
        self.plans.append(plan)
        for rank, part in enumerate(plan.parts):
            assert part.num_tokens <= self.scheduler.limits.max_num_batched_tokens
            assert len(part.rows) == len({row.id for row in part.rows}) <= self.scheduler.limits.max_num_seqs
            assert all(self.seqs[row.id].data_rank == rank for row in part.rows) and part.burst == plan.burst
        newest = {row.id for row in self.newest.rows}
        assert all(row.id in newest for row in plan.rows if row.continues)
        sampled = {}
        for row in plan.rows:
            seq = self.seqs[row.id]
            tokens, ended = self.ahead.setdefault(row.id, ([], False)) if row.continues else ([], False)
            assert row.continues or len(seq.tokens) >= row.start + row.num_new
            for position in range(row.start, row.start + row.num_new):
                if not ended:
                    self.compute(seq, seq.tokens + tokens, position)
        for row in plan.rows:
            seq, new = self.seqs[row.id], []
            before, ended = self.ahead[row.id] if row.continues else ([], False)
            assert row.continues == bool(before or ended)
            assert row.max_samples <= plan.burst
            while len(new) < row.max_samples and not ended:
                tokens = seq.tokens + before + new
                if new:
                    self.compute(seq, tokens, len(tokens) - 1)
                new.append(sum(tokens) * 7 % 20)
                ended = new[-1] == END
            sampled[row.id] = new
            self.ahead[row.id] = (new, ended or len(seq.output) + len(before + new) >= self.most(seq))
        if plan.rows:
            self.newest = plan
            self.flights.append((plan, sampled))
        return plan

    def most(self, seq):
        return min(seq.params.max_tokens, self.longest - len(seq.prompt))

    def read(self):
        plan, sampled = self.flights.pop(0)
        for row in plan.rows:
            if (seq := self.seqs.get(row.id)) is None:
                continue
            self.scheduler.commit(seq, row, sampled[row.id])
            if row.max_samples and (len(seq.output) >= self.most(seq) or seq.tokens[-1] == END):
                self.scheduler.remove(self.seqs.pop(row.id))
                self.finished[row.id] = seq
        self.check_blocks()

    def compute(self, seq, tokens, position):
        """Write the key of a token to its slot, and read all keys that it sees."""
        prefix = (seq.root_hash, *tokens[: position + 1])
        for g, table in enumerate(seq.tables):
            assert table[position // S] != 0
            held = self.held[seq.data_rank * len(self.groups) + g]
            held[table[position // S], position % S] = prefix
            for p in range(first_visible(self.groups[g], position), position + 1):
                assert held[table[p // S], p % S] == prefix[: p + 2], "another token, or one lost"

    def check_blocks(self):
        for i, pool in enumerate(self.tables.pools):
            rank, g = divmod(i, len(self.groups))
            held = [seq.tables[g] for seq in self.seqs.values() if seq.tables and seq.data_rank == rank]
            pool.check(Counter(block for table in held for block in table if block))

    def drain(self):
        for _ in range(1000):
            if not self.seqs:
                break
            self.step_ahead()
        assert not self.seqs and not self.scheduler.running and not self.scheduler.waiting


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW, CHUNK)], ids=["full", "hybrid", "local"])
def test_ten_thousand_random_operations_lose_no_block_and_no_token(groups, prefix_caching):
    world = World(groups, prefix_caching=prefix_caching, num_blocks=14 if FULL in groups else 6)
    for _ in range(1700):  # six worlds of them
        ahead = [world.step_ahead] * 3
        world.rng.choice([world.add, *ahead, world.step, world.abort, world.fork])()
    world.drain()
    for seq in world.finished.values():
        for i in range(len(seq.output)):
            assert seq.output[i] == sum(seq.tokens[: len(seq.prompt) + i]) * 7 % 20
    assert len(world.finished) > 100
    assert sum(len(plan.preempted) for plan in world.plans) > 5, "the pool was never short: the test shows nothing"
    assert any(plan.burst > 1 for plan in world.plans)
    hits = sum(hit for plan in world.plans for _, hit in plan.admitted)
    assert hits > 100 if prefix_caching else hits == 0


def test_first_come_first_served_and_the_youngest_gives_way():
    world = World((FULL,), num_blocks=6, budget=40)
    old, young = world.add(list(range(7)), 12), world.add(list(range(20, 27)), 12)
    while not world.plans or not world.plans[-1].preempted:
        world.step()
    assert world.plans[-1].preempted == (young.id,) and old in world.scheduler.running
    late = world.add([1], 1)
    assert list(world.scheduler.waiting) == [young, late]
    world.drain()
    assert [id for plan in world.plans for id, _ in plan.admitted] == [old.id, young.id, young.id, late.id]


def test_a_long_prompt_is_cut_to_the_budget_and_decodes_go_on_beside_it():
    world = World((FULL,), num_blocks=40, budget=12)
    first, long = world.add([1, 2], 20), world.add(list(range(30)), 1)
    sizes = []
    while long.id not in world.finished:
        sizes.append({row.id: row.num_new for row in world.step().rows})
    assert [s.get(long.id) for s in sizes] == [10, 11, 9]
    assert [s[first.id] for s in sizes] == [2, 1, 1]


def test_a_shared_beginning_is_computed_once_and_a_salt_keeps_it_apart():
    world = World((FULL,), num_blocks=40)
    prompt = list(range(10))
    for salt, expected in ((b"", 0), (b"", 8), (b"other", 0), (b"other", 8)):
        world.add(prompt, 1, salt=salt)
        plan = world.step()
        assert plan.admitted[0][1] == expected
    world.add(prompt[:8], 1)
    assert world.step().admitted[0][1] == 4, "the last token is always computed"


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW, CHUNK)], ids=["full", "hybrid", "local"])
def test_sequences_of_one_step_share_their_blocks(groups):
    """A prompt four times: only its last block is computed more than once; and a prompt cut by the budget."""
    world = World(groups, num_blocks=40, budget=20, max_num_seqs=8)
    for _ in range(4):
        world.add(list(range(10)), 3)
    plan = world.step()
    assert [hit for _, hit in plan.admitted] == [0, 8, 8, 8] and [row.num_new for row in plan.rows] == [10, 2, 2, 2]
    if groups == (FULL,):
        assert world.tables.pools[0].num_held == 2 + 4, "two full blocks for all, one of its own for each"
    world.drain()
    for _ in range(2):
        world.add(list(range(50, 74)), 3)
    assert [row.num_new for row in world.step().rows] == [20]
    assert [row.num_new for row in world.step().rows] == [4, 4], "the second follows one block behind the first"
    world.drain()


def test_a_window_gives_back_what_is_out_of_reach():
    world = World((FULL, WINDOW), num_blocks=40, max_num_seqs=1, budget=4)
    world.add(list(range(4)), 60)
    most = [0, 0]
    while world.seqs:
        world.step()
        most = [max(a, pool.num_held) for a, pool in zip(most, world.tables.pools, strict=True)]
    assert most[0] == 16 and most[1] <= 4


@pytest.mark.parametrize(("budget", "burst"), [(4, 1), (4, 8), (30, 3), (9, 2)])
def test_a_windows_pool_of_its_computed_size_is_never_what_is_short(budget, burst):
    """The full group has enough blocks: if a window's pool were too small, a running sequence would be preempted, would
    get no row, or a shorter burst. A sequence that waits may have to wait for the blocks of one that is ending."""
    world = World((FULL, WINDOW, CHUNK), num_blocks=200, budget=budget, burst=burst, sized=True, prefix_caching=False)
    limits, schedule, held, seen = world.scheduler.limits, world.scheduler.schedule, [0, 0], Counter()

    def checked(in_flight):
        going = [seq for seq in world.scheduler.running if seq.num_left > 0]
        left = {seq.id: seq.num_left for seq in going}
        plan = schedule(in_flight)
        assert not plan.preempted
        assert len(plan.rows) >= len(going) or plan.num_tokens == limits.max_num_batched_tokens
        if plan.is_decode and plan.rows and not world.scheduler.waiting and not plan.admitted:
            assert plan.burst == min(burst, max(left.values()))
        seen.update(ahead=bool(in_flight and plan.rows), full=bool(plan.burst == burst))
        held[:] = [max(most, pool.num_held) for most, pool in zip(held, world.tables.pools[1:], strict=True)]
        return plan

    world.scheduler.schedule = checked
    for _ in range(1500):
        world.rng.choice([world.add, world.add, *[world.step_ahead] * 3, world.step, world.abort])()
    world.drain()
    assert seen["ahead"] > 100 and seen["full"] > 1
    assert all(3 * most > pool.num_blocks for most, pool in zip(held, world.tables.pools[1:], strict=True)), "too large"


def test_a_burst_ends_where_no_blocks_are_left():
    world = World((FULL,), num_blocks=4, burst=8)
    world.add([1, 2, 3], 9)
    world.step()
    assert world.step().burst == 8
    world = World((FULL,), num_blocks=6, burst=8)
    world.add([1, 2, 3], 9), world.add([1, 2, 3, 4], 9)
    world.step()
    assert world.step().burst == 4  # five blocks: two rows of eight more tokens would need six


def test_what_an_untrusted_sequence_wrote_is_not_shared():
    world = World((FULL,), num_blocks=40)
    seq = world.add(list(range(10)), 5)
    world.step()
    world.scheduler.remove(world.seqs.pop(seq.id), trusted=False)
    world.add(list(range(10)), 1)
    assert world.step().admitted[0][1] == 0


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW,), (FULL, WINDOW, CHUNK), (WINDOW, CHUNK)])
def test_the_hit_is_the_longest_beginning_whose_visible_blocks_are_all_cached(groups):
    rng, seen = random.Random(2), Counter()
    for _ in range(300):
        tables = BlockTables([99] * len(groups), S, groups)
        seq = Sequence("a", tuple(range(S * 12 + 1)), SamplingParams())
        tables.admit(seq)
        assert tables.extend(seq, len(seq.tokens))
        tables.publish(seq, len(seq.tokens))
        share = rng.choice((0.3, 0.6, 0.9))
        cached = [[rng.random() < share for _ in range(12)] for _ in groups]
        for table, pool, kept in zip(seq.tables, tables.pools, cached, strict=True):
            for block in (block for block, keeps in zip(table, kept, strict=False) if not keeps):
                pool.forget(block)
        firsts = lambda hits: (first_visible(group, hits * S) // S for group in groups)
        fits = lambda hits: all(all(kept[a:hits]) for kept, a in zip(cached, firsts(hits), strict=True))  # noqa: B023
        wanted = max(hits for hits in range(13) if fits(hits))
        seen[wanted] += 1
        assert tables.num_cached(Sequence("b", seq.prompt, SamplingParams())) == wanted * S
    assert len(seen) > 4


@pytest.mark.parametrize("groups", [(FULL,), (FULL, Group((1,), sliding_window=1024))])
def test_a_prompt_of_which_a_half_is_cached_is_looked_up_in_linear_time(groups):
    """While it waits for blocks it is looked up in every step, beside the rows that decode."""

    def seconds(num_blocks):
        tables = BlockTables([num_blocks + 2] * len(groups), S, groups)
        prompt = tuple(range(num_blocks * S))
        first = Sequence("a", prompt[: len(prompt) // 2], SamplingParams())
        tables.admit(first)
        assert tables.extend(first, len(first.tokens))
        tables.publish(first, len(first.tokens))
        seq, times = Sequence("b", prompt, SamplingParams()), []
        for _ in range(7):
            begin = time.thread_time()  # other processes on a busy machine do not count
            assert tables.num_cached(seq) == len(first.tokens)
            times.append(time.thread_time() - begin)
        return min(times)

    assert seconds(8000) < 9 * seconds(2000), "16 times as long if it is quadratic"


def test_the_least_recently_used_block_is_evicted_first():
    world = World((FULL,), num_blocks=7, max_num_seqs=1)
    a, b = [1] * 9, [2] * 9  # three blocks each, two of them full
    for prompt in (a, b, a):  # a was used last
        world.add(prompt, 1)
        world.step()
    world.add([3] * 9, 1)
    world.step()
    world.add(a, 1)
    assert world.step().admitted[0][1] == 8
    world.add(b, 1)
    assert world.step().admitted[0][1] < 8


def test_impossible_limits_are_refused_with_every_reason():
    with pytest.raises(ValueError, match="max_num_seqs=0.*max_burst=-1"):
        Limits(0, 8, 8, -1)
    with pytest.raises(ValueError, match="max_num_batched_tokens=4 must be at least max_num_seqs=8"):
        Limits(8, 4, 8)
