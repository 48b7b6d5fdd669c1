"""An agent function against the real session server: what it was sampled is what the session's samples hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from miles_hpc.core.deadline import Deadline
from miles_hpc.core.types import ChatMessage, SampleStatus, SamplingParams
from miles_hpc.rollout.agent_function import AgentRunner, AgentSession, AgentTask

pytest.importorskip("openai")
service = pytest.importorskip("tests.fakes.session_service", reason="the session server or aiohttp isn't here")

TASK = AgentTask(
    prompt=(ChatMessage(role="user", content="hello"),), sampling=SamplingParams(max_new_tokens=20, temperature=0.7)
)


async def agent(base_url: str, prompt: Any, request_kwargs: Any, metadata: Any) -> dict[str, Any]:
    """Two turns, as an agent for an open endpoint would ask: any key, what it was given in each request."""
    from openai import AsyncOpenAI

    async with AsyncOpenAI(base_url=base_url, api_key="EMPTY", max_retries=0) as client:
        first = await client.chat.completions.create(model="policy", messages=prompt, **request_kwargs)
        said = first.choices[0].message.content
        messages = [*prompt, {"role": "assistant", "content": said}, {"role": "user", "content": "Sure?"}]
        second = await client.chat.completions.create(model="policy", messages=messages, **request_kwargs)
    return {"reward": 1.0, "said": [said, second.choices[0].message.content]}


def test_an_agents_turns_are_one_sample_and_a_wrong_token_gets_none(tmp_path: Path) -> None:
    async def scene(served: Any) -> None:
        url, headers = await served.open()
        token = headers["Authorization"].removeprefix("Bearer ")
        runner = AgentRunner(agent)
        try:
            outcome = await runner.run(TASK, AgentSession(f"{url}/v1", token), Deadline(60, "agent"))
            assert (outcome.status, outcome.reward) == (SampleStatus.COMPLETED, 1.0), outcome.error
            assert outcome.metadata["said"] == ["yes", "yes"]
            refused = await runner.run(TASK, AgentSession(f"{url}/v1", "another"), Deadline(60, "agent"))
            assert refused.status is SampleStatus.FAILED and "401" in refused.error
        finally:
            await runner.close()
        samples = await served.samples((url, headers))
        assert len(samples) == 1 and len(served.script.seen) == 2
        service.check_samples(samples, served.script.seen)

    service.play(tmp_path, scene)
