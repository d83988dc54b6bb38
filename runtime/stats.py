"""What an engine has done so far: counts, and how well its cache was used."""

from dataclasses import dataclass

from compress.runtime.scheduler import Schedule, Scheduler


@dataclass(kw_only=True, slots=True)
class EngineStats:
    """Counts since the engine was made.

    Slots are places for one token in the cache, summed over steps, each taken once the step has
    written its tokens: all of the pool, those in blocks that requests own, and those that
    hold no token of their request. A shared block is counted in `owned_slots` once; its empty slots
    once for each owner, which matters only between a fork and the next token.
    """

    num_steps: int = 0
    computed_tokens: int = 0
    generated_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    peak_running: int = 0
    pool_slots: int = 0
    owned_slots: int = 0
    wasted_slots: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    num_verifications: int = 0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens gained per pass that verified drafts, the target's own token included."""
        return 1.0 + self.accepted_tokens / max(self.num_verifications, 1)

    @property
    def kv_utilization(self) -> float:
        """Share of the pool that requests own, mean over steps."""
        return self.owned_slots / max(self.pool_slots, 1)

    @property
    def kv_waste(self) -> float:
        """Share of the owned slots that hold no token, over all steps."""
        return self.wasted_slots / max(self.owned_slots, 1)

    def record_step(self, scheduler: Scheduler, schedule: Schedule) -> None:
        """Count a step that runs, before its results change the requests."""
        blocks, size = scheduler.blocks, scheduler.blocks.block_size
        ends = {item.request: item.start + item.num_tokens for item in schedule.scheduled}
        self.num_steps += 1
        self.computed_tokens += sum(item.num_tokens for item in schedule.scheduled)
        self.prefix_hit_tokens += schedule.prefix_hit_tokens
        self.peak_running = max(self.peak_running, len(scheduler.running))
        self.pool_slots += blocks.num_blocks * size
        self.owned_slots += (blocks.num_blocks - blocks.num_free_blocks) * size
        for request in scheduler.running:
            num_tokens = ends.get(request, request.num_computed_tokens)
            self.wasted_slots += len(blocks.table(request.request_id)) * size - num_tokens
