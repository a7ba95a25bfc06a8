"""PPO with a recurrent policy: CartPole without its velocities. Needs gymnasium.

The rollout calls the policy step by step, the update on whole sequences. Both draw the same masks,
from the same `seed`, steps and `examples`: before the first update the probability ratio is 1.
"""

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.distributions import Categorical

import zoneout as zo

ENVS, STEPS, EPOCHS, GAMMA, LAMBDA, CLIP, RATE = 8, 128, 4, 0.99, 0.95, 0.2, 3e-3


class Policy(nn.Module):
    def __init__(self, noise=None):
        super().__init__()
        self.core = zo.LSTM(2, 64, noise=noise)
        self.action, self.value = nn.Linear(64, 2), nn.Linear(64, 1)

    def forward(self, x, state, **masks):
        y, state = self.core(x, state, **masks)
        return Categorical(logits=self.action(y)), self.value(y)[..., 0], state


def seen(observation):  # position and angle; the two velocities are hidden
    return torch.from_numpy(observation[:, [0, 2]]) / torch.tensor([2.4, 0.21])


def train(noise, seed, rollouts):
    """Train, and return the policy and the return of each finished episode."""
    torch.manual_seed(seed)
    at_end = {"autoreset_mode": AutoresetMode.SAME_STEP}
    envs = gym.make_vec("CartPole-v1", ENVS, vectorization_mode="sync", vector_kwargs=at_end)
    policy, score, returns = Policy(noise), np.zeros(ENVS), []
    optimizer = torch.optim.Adam(policy.parameters(), RATE)
    x, state = seen(envs.reset(seed=seed)[0]), torch.zeros(2, 1, ENVS, 64)  # h and c
    starts = torch.ones(ENVS, dtype=torch.bool)
    for rollout in range(rollouts):
        optimizer.param_groups[0]["lr"] = RATE * (1 - rollout / rollouts)
        masks, rows, first = {"seed": zo.fold(seed, rollout)}, [], tuple(state)
        for t in range(STEPS):
            now = {"first_step": t, "resets": starts[None]}
            with torch.no_grad():
                pi, value, state = policy(x[None], tuple(state), **now, **masks)
            action = pi.sample()
            new, reward, ended, cut, _ = envs.step(action[0].numpy())
            reward_t = torch.from_numpy(reward / 50).float()
            rows.append((x, starts, action[0], pi.log_prob(action)[0], value[0], reward_t))
            x, starts = seen(new), torch.from_numpy(ended | cut)
            score += reward
            returns += score[ended | cut].tolist()
            score[ended | cut] = 0.0
        xs, begins, actions, old, values, rewards = map(torch.stack, zip(*rows))
        with torch.no_grad():
            after = policy(x[None], state, first_step=STEPS, resets=starts[None], **masks)[1]
        goes_on = ~torch.cat([begins[1:], starts[None]])
        delta = rewards + GAMMA * goes_on * torch.cat([values[1:], after]) - values
        for t in reversed(range(STEPS - 1)):  # generalised advantages, in place
            delta[t] += GAMMA * LAMBDA * goes_on[t] * delta[t + 1]
        target, scaled = delta + values, (delta - delta.mean()) / delta.std()
        halves = [half for _ in range(EPOCHS) for half in torch.randperm(ENVS).chunk(2)]
        for n, part in enumerate(halves):  # whole sequences of half of the environments
            same = {"examples": part, "resets": begins[:, part]}
            state_0 = tuple(s[:, part] for s in first)
            pi, value, _ = policy(xs[:, part], state_0, **same, **masks)
            ratio = (pi.log_prob(actions[:, part]) - old[:, part]).exp()
            if n == 0:  # no weight has changed: fails without seed= or examples=
                torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-4)
            a, clipped = scaled[:, part], ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = -torch.min(ratio * a, clipped * a).mean() - 0.01 * pi.entropy().mean()
            loss = loss + 0.5 * (value - target[:, part]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        if (rollout + 1) % 10 == 0:
            print(f"  step {(rollout + 1) * STEPS * ENVS}: {np.mean(returns[-40:]):.1f}")
    return policy, returns


if __name__ == "__main__":
    noise = zo.Zoneout(cell=0.1, hidden=0.05)
    print(f"CartPole-v1 without velocities, {noise}; mean return of the last 40 episodes")
    _, returns = train(noise, seed=1, rollouts=50)
    print("The ratio was 1 at the first update of every rollout.")
    assert np.mean(returns[-40:]) > 3 * np.mean(returns[:40])
