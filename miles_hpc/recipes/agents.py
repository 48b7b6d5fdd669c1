"""Agent functions to start from. Name one in the run file:

    [rollout]
    custom_agent_function_path = "miles_hpc.recipes.agents:play_turns"

What an agent function is given and may return: miles_hpc/rollout/agent_function.py and agent_player.py. They need the
package `openai` in the rollout nodes' Python.
"""

from __future__ import annotations

from typing import Any

__all__ = ["play_turns"]


async def play_turns(
    base_url: str,
    prompt: list[dict[str, str]],
    request_kwargs: dict[str, Any],
    metadata: dict[str, Any],
    *,
    api_key: str,
    episode: Any,
    max_turns: int = 0,
) -> dict[str, Any] | None:
    """Play the environment's own turns, as the built-in sampler does, through OpenAI's client.

    `max_turns` is the run's; after so many it gives up. A response that its length limit cut ends the conversation.
    """
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    # The server is on this node and speaks plain HTTP: loading certificates would take most of a short task's time.
    # And what speaks to it mustn't go through a site's proxy.
    http = DefaultAsyncHttpxClient(verify=False, trust_env=False)
    messages: list[Any] = list(prompt)
    turns = 0
    # Retries bridge a session server that is started again.
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=10, http_client=http) as client:
        while True:
            answer = await client.chat.completions.create(model="policy", messages=messages, **request_kwargs)
            choice, turns = answer.choices[0], turns + 1
            if choice.finish_reason == "length":
                return {"truncated": True, "turns": turns}
            text = choice.message.content or ""
            turn = await episode.step(text)
            if turn.done:
                return {"reward": turn.reward, "turns": turns}
            if turns == max_turns:
                return {"truncated": True, "turns": turns}
            messages.append({"role": "assistant", "content": text})
            messages += [{"role": message.role, "content": message.content} for message in turn.messages]
