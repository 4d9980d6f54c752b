# SPDX-License-Identifier: MIT
"""Golden data for Muon and EMA: python generate_muon.py OUT [SEED]. torch.optim.Muon (PyTorch 2.15, CPU) beside the same arithmetic in f64.

File `muon.txt`, format as in README.md (numbers by fill(seed, shape, scale)):
  case NAME
  muon LR WD MOMENTUM NESTEROV STEPS ADJUST          ADJUST 0 original, 1 match_rms_adamw, 2 spectral_unclamped
  matrix R C SEEDP SEEDG                              parameter = fill(SEEDP, (R, C), 1); gradient of step k = 1, 2, 3: fill(SEEDG + k, (R, C), 2)
  step K values[R*C]                                  all in f64 (Newton-Schulz, too): compare f32 arithmetic with relative 2e-4 of the update's norm
  torch K values[R*C]                                 torch.optim.Muon (f32 parameter, Newton-Schulz in bf16): it differs from `step` by up to 6 % of one update's norm
  buf K values[R*C]                                   its momentum_buffer after the step (f32)
  case ema_NAME / ema DECAY N SEEDW / step K values[N]   weights of step k: fill(SEEDW + k, (N,), 1); average starts as those of step 0; f32
"""
import math, sys, torch
M64 = (1 << 64) - 1
def splitmix64(x):
    x = (x + 0x9E3779B97F4A7C15) & M64; x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & M64; x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & M64
    return x ^ (x >> 31)
def fill(seed, shape, scale):
    n = math.prod(shape)
    return torch.tensor([((splitmix64((seed + 0x9E3779B97F4A7C15 * i) & M64) >> 40) / 16777216.0 - 0.5) * scale for i in range(n)], dtype=torch.float64).reshape(shape)
def hexes(t): return ' '.join(float(x).hex() for x in t.double().flatten())
def ns(g, steps, eps=1e-7):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.clone(); t = x.size(0) > x.size(1)
    if t: x = x.T
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        s = x @ x.T; x = a * x + (b * s + c * s @ s) @ x
    return x.T if t else x
def adjust(lr, kind, r, c): return lr * (math.sqrt(max(1, r / c)), 0.2 * math.sqrt(max(r, c)), math.sqrt(r / c))[kind]
names = (None, 'match_rms_adamw', 'spectral_unclamped')
out, seed = open(sys.argv[1], 'w'), int(sys.argv[2]) if len(sys.argv) > 2 else 91000
print('fsdp-golden 1 muon', file=out)
cases = [('square', 6, 6, .02, .1, .95, 1, 5, 0), ('wide', 4, 12, .02, .1, .95, 1, 5, 0), ('tall', 13, 5, .02, .1, .95, 1, 5, 0), ('row', 1, 9, .1, 0., .9, 0, 5, 0), ('column', 9, 1, .1, 0., .9, 1, 5, 0),
         ('rms', 8, 16, .003, .1, .95, 1, 5, 1), ('spectral', 3, 10, .02, .01, .95, 1, 5, 2), ('no_nesterov', 7, 8, .02, .1, .8, 0, 5, 0), ('one_iteration', 5, 7, .02, .1, .95, 1, 1, 0),
         ('eight_iterations', 10, 11, .02, 0., .95, 1, 8, 0), ('zero_momentum', 6, 4, .05, .1, 0., 1, 5, 0), ('uneven', 17, 10, .02, .1, .95, 1, 5, 1)]
if seed != 91000: cases = [(n, r + 1 + i % 3, c + 2 - i % 2, lr * 1.5, wd * .7, mo * .97, ne, st, ad) for i, (n, r, c, lr, wd, mo, ne, st, ad) in enumerate(cases)]
for i, (name, r, c, lr, wd, mo, ne, st, ad) in enumerate(cases):
    sp, sg = seed + 100 * i, seed + 100 * i + 50
    p64, buf64 = fill(sp, (r, c), 1.0), torch.zeros(r, c, dtype=torch.float64)
    p = torch.nn.Parameter(p64.float()); opt = torch.optim.Muon([p], lr=lr, weight_decay=wd, momentum=mo, nesterov=bool(ne), ns_steps=st, adjust_lr_fn=names[ad])
    print(f'\ncase {name}\nmuon {lr.hex()} {wd.hex()} {float(mo).hex()} {ne} {st} {ad}\nmatrix {r} {c} {sp} {sg}', file=out)
    for k in (1, 2, 3):
        g = fill(sg + k, (r, c), 2.0); buf64 = buf64 + (g - buf64) * (1 - mo); u = g + (buf64 - g) * mo if ne else buf64
        p64 = p64 * (1 - lr * wd) - adjust(lr, ad, r, c) * ns(u, st)
        p.grad = g.float(); opt.step()
        print(f'step {k} {hexes(p64)}\ntorch {k} {hexes(p.data)}\nbuf {k} {hexes(opt.state[p]["momentum_buffer"])}', file=out)
for i, decay in enumerate((0.9, 0.999, 0.0, 1.0)):
    n, sw = 23 + i, seed + 5000 + 100 * i
    avg = [fill(sw, (n,), 1.0).float()]; f = torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    print(f'\ncase ema_{i}\nema {float(decay).hex()} {n} {sw}', file=out)
    for k in (1, 2, 3):
        f(avg, [fill(sw + k, (n,), 1.0).float()], k); print(f'step {k} {hexes(avg[0])}', file=out)
