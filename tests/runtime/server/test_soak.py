"""Thousands of mixed requests, many of them cut off: nothing leaks and nothing is stuck."""

import asyncio
import random
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai import AsyncOpenAI

from tests.compress.serving import serving

NUM_REQUESTS, NUM_CLIENTS = 2000, 24
WARM_UP = 500  # requests until allocators and caches have what they need
GROWTH_BYTES = 24 * 2**20
WORDS = ["import", "statement", "module", "name", "object", "class", "value", "loop", "async"]
MESSAGES: Any = [{"role": "user", "content": "What does an import statement do?"}]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


class Soak:
    """Clients that send one request after another, and the counts of how they ended."""

    def __init__(self, url: str, process: psutil.Process) -> None:
        self.client = AsyncOpenAI(base_url=f"{url}/v1", api_key="-", timeout=300, max_retries=0)
        self.process = process
        self.random = random.Random(0)
        self.ends: Counter[str] = Counter()
        self.rss: list[int] = []
        self.num_left = NUM_REQUESTS

    async def run(self) -> None:
        """All requests; RSS is noted after every fiftieth."""
        async with self.client:
            await asyncio.gather(*(self._work() for _ in range(NUM_CLIENTS)))

    async def _work(self) -> None:
        while self.num_left:
            self.num_left -= 1
            if self.num_left % 50 == 0:
                self.rss.append(self.process.memory_info().rss)
            kind = self.random.choice(KINDS)
            self.ends[await kind(self)] += 1

    def fields(self, most_tokens: int = 60) -> dict[str, Any]:
        """A completion request: greedy or sampled, with a common or a private prefix."""
        start = " ".join(WORDS * 6) if self.random.random() < 0.4 else ""
        words = self.random.choices(WORDS, k=self.random.randint(1, 60))
        return {
            "model": "tiny",
            "prompt": f"{start} {' '.join(words)}",
            "max_tokens": self.random.randint(1, most_tokens),
            "temperature": self.random.choice([0.0, 1.0]),
            "seed": self.random.randrange(1000),
            "extra_body": {"ignore_eos": self.random.random() < 0.8},
        }

    async def whole(self) -> str:
        """A completion, sometimes of several choices and with a stop string."""
        copies = self.random.choice([1, 1, 1, 3])
        stop = self.random.choice([None, ["e"], ["statement", "qq"]])
        answer = await self.client.completions.create(**self.fields(), n=copies, stop=stop)
        assert len(answer.choices) == copies
        assert all(choice.finish_reason in ("stop", "length") for choice in answer.choices)
        return "whole"

    async def stream(self) -> str:
        """A streamed completion, read to its end."""
        reasons = []
        async with await self.client.completions.create(**self.fields(), stream=True) as stream:
            async for chunk in stream:
                reasons.append(chunk.choices[0].finish_reason)
        assert reasons[-1] in ("stop", "length")
        return "stream"

    async def chat(self) -> str:
        """A chat; one in twenty lasts as long as it wants, up to the whole cache."""
        most = None if self.random.random() < 0.05 else self.random.randint(1, 60)
        answer = await self.client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_completion_tokens=most
        )
        assert answer.choices[0].finish_reason in ("stop", "length")
        return "chat"

    async def close_early(self) -> str:
        """A stream that is closed after some chunks."""
        fields = self.fields(200) | {"extra_body": {"ignore_eos": True}}
        async with await self.client.completions.create(**fields, stream=True) as stream:
            left = self.random.randint(0, 9)
            async for _ in stream:
                if left == 0:
                    break
                left -= 1
        return "closed"

    async def give_up(self) -> str:
        """A request whose client does not wait."""
        patience = self.random.uniform(0.0, 0.3)
        try:
            create = self.client.completions.create(**self.fields(200))
            await asyncio.wait_for(create, patience)
        except TimeoutError:
            return "given up"
        return "whole"

    async def refused(self) -> str:
        """A request that can never fit, or is malformed."""
        change = self.random.choice([{"max_tokens": 5000}, {"max_tokens": 3000}, {"top_p": 7}])
        try:
            await self.client.completions.create(**self.fields() | change)
        except openai.BadRequestError:
            return "refused"
        raise AssertionError("it was taken")


KINDS = [Soak.whole, Soak.stream, Soak.chat, Soak.close_early, Soak.give_up, Soak.refused]


async def metrics(url: str) -> dict[str, float]:
    """The metrics without labels, once nothing is in flight."""
    while True:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        values = dict(re.findall(r"^(compress_\w+) (\S+)$", text, flags=re.MULTILINE))
        if values["compress_requests_in_flight"] == "0":
            return {name: float(value) for name, value in values.items()}
        await asyncio.sleep(0.05)


def test_soak_leaves_nothing_behind(llama: Path) -> None:
    limits = ["--num-blocks", "24", "--max-num-seqs", "8"]
    with serving(str(llama), "--name", "tiny", *limits) as server:
        soak = Soak(server.url, psutil.Process(server.process.pid))
        asyncio.run(soak.run())
        assert soak.ends.total() == NUM_REQUESTS
        assert all(soak.ends[end] > 50 for end in ("whole", "stream", "chat", "closed", "refused"))
        values = asyncio.run(asyncio.wait_for(metrics(server.url), 60))
        # The engine checks its block tables whenever it is idle; a failed check would be fatal.
        assert values["compress_kv_blocks_owned"] == 0
        assert values["compress_requests_running"] == values["compress_requests_waiting"] == 0
        settled = soak.rss[WARM_UP // 50 :]
        half = len(settled) // 2
        growth = sorted(settled[half:])[half // 2] - sorted(settled[:half])[half // 2]
        print(f"{dict(soak.ends)}; RSS {soak.rss[0] / 2**20:.0f} MiB at first,", end=" ")
        print(f"{settled[0] / 2**20:.0f} settled, {settled[-1] / 2**20:.0f} at last", values)
        assert growth < GROWTH_BYTES
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
