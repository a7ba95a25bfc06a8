"""PPO with a recurrent policy: CartPole without its velocities. Needs gymnasium.

The rollout runs the policy step by step, the update whole sequences. Both draw the same masks, from
the same `seed`, steps and `examples`, so the probability ratio is 1 before the first update.
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


def train(noise, seed, rollouts):  # the policy and the return of each finished episode
    torch.manual_seed(seed)
    at_end = {"autoreset_mode": AutoresetMode.SAME_STEP}
    envs = gym.make_vec("CartPole-v1", ENVS, vectorization_mode="sync", vector_kwargs=at_end)
    policy, starts, hc = Policy(noise), torch.ones(ENVS).bool(), tuple(torch.zeros(2, 1, ENVS, 64))
    optimizer = torch.optim.Adam(policy.parameters(), RATE)
    x, score, returns = seen(envs.reset(seed=seed)[0]), np.zeros(ENVS), list[float]()
    for rollout in range(rollouts):
        optimizer.param_groups[0]["lr"] = RATE * (1 - rollout / rollouts)
        masks, rows, first = {"seed": zo.fold(seed, rollout)}, [], hc
        for t in range(STEPS):
            with torch.no_grad():
                pi, value, hc = policy(x[None], hc, first_step=t, resets=starts[None], **masks)
            new, reward, ended, cut, _ = envs.step((action := pi.sample())[0].numpy())
            paid, done, score = torch.from_numpy(reward / 50).float(), ended | cut, score + reward
            rows.append((x, starts, action[0], pi.log_prob(action)[0], value[0], paid))
            x, starts, returns = seen(new), torch.from_numpy(done), returns + score[done].tolist()
            score[done] = 0.0
        xs, begins, actions, old, values, rewards = map(torch.stack, zip(*rows))
        after = policy(x[None], hc, first_step=STEPS, resets=starts[None], **masks)[1].detach()
        goes_on = ~torch.cat([begins[1:], starts[None]])
        delta = rewards + GAMMA * goes_on * torch.cat([values[1:], after]) - values
        for t in reversed(range(STEPS - 1)):  # generalised advantages, in place
            delta[t] += GAMMA * LAMBDA * goes_on[t] * delta[t + 1]
        target, scaled = delta + values, (delta - delta.mean()) / delta.std()
        halves = (half for _ in range(EPOCHS) for half in torch.randperm(ENVS).chunk(2))
        for n, part in enumerate(halves):  # whole sequences of half of the environments
            here, resets = tuple(s[:, part] for s in first), begins[:, part]
            pi, value, _ = policy(xs[:, part], here, resets=resets, examples=part, **masks)
            ratio = (pi.log_prob(actions[:, part]) - old[:, part]).exp()
            if n == 0:  # no weight has changed: fails without seed= or examples=
                torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-4)
            a, loss = scaled[:, part], 0.5 * (value - target[:, part]).square().mean()
            loss = loss - torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
            policy.zero_grad()
            (loss - 0.01 * pi.entropy().mean()).backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
        if rollout % 5 == 4:
            print(f"rollout {rollout + 1}: {np.mean(returns[-40:]):.1f}, mean of 40 episodes")
    return policy, returns


if __name__ == "__main__":
    _, returns = train(zo.Zoneout(cell=0.1, hidden=0.05), seed=1, rollouts=50)
    assert np.mean(returns[-40:]) > 3 * np.mean(returns[:40])
