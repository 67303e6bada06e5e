"""Tuning constants of the search, in one table.

In brackets: the page in docs/benchmarks, or the date and title of the entry in docs/log.md, that chose the value. Other values have
no page.
"""

# Policies: values that the search tries
PREFETCH_DEPTHS = (2, 1, 3)  # order of trial: two hide latency that one cannot, three rarely help
GRADIENT_SLOTS = (2, 1, 3, 4, 6, 8)  # the last also represents larger numbers [2026-11-27, cheaper integer programs]
LEAST_SAVED_SLOTS = 2  # per tier: with one slot, forward waits for each offload
SAVED_SLOTS = 3  # per tier, in suggested policies; climbs try other numbers [2026-11-26, saved-activation slots]
STRIDES = (1, 4)  # layers per boundary [knobs_2026-11-22]

# Sizes: micro-batches and tiles
# Parts to divide a batch into; sizes between two neighbours are not much faster than both. More parts only if fewer do not fit: the
# plan is then long, and a small part costs little of the step. [micro-batches_2026-11-22]
N_PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MORE_PARTS = tuple(1 << n for n in range(9, 31))
MOST_MICRO_BATCHES = 20_000  # in a searched step; even listing the group sizes of more takes long
LEAST_FRACTION = 0.6  # of device memory; if one sequence needs more, tiles are used
MUCH_FRACTION = 0.02  # of device memory: logits above it justify a smaller tile
# Usual tokens per tile of logits. Larger tiles read the sum of the head's gradient less often, which matters where fused kernels
# leave little other work.
LOSS_TILE = {"eager": 1024, "online": 4096}
SMALLER_LOSS_TILE = 4  # divisor: with a quarter of the logits, a tile still costs little
# In tokens. Each tile reads its weight gradient and adds it to a sum: ten bytes per parameter, for six FLOP per parameter and token
LEAST_MLP_TILE, LEAST_LOSS_TILE = 1024, 128
USUAL_SUM_GROUPS = 8  # for several GPUs: results are then bitwise identical on 2, 4 and 8 of them
HOST_FRACTIONS = (1.0, 1.15)  # host memory of a split, relative to the need of the smallest plan

# Evaluation: simulation
MAX_STEPS = 24  # simulated steps of a plan without a steady state
MOST_KEPT_OPS = 24_000  # memory limit, in ops, of cached op tables
LONGEST_SEARCHED_OPS = 48_000  # plans with more ops are bounded, not simulated [long-steps_2026-11-22]

# Search: sizes
STARTS = 3  # greedy starting policies of a size, by lowest bound [2026-11-25, no greedy plans]
MOST_SEARCHED = 2  # sizes by fastest first policy; also the one with the lowest bound [2026-11-24, order of bounds]
MOST_TIGHTENED = 64  # nodes of unsearched sizes to tighten
NEAR_FRACTION = 0.001  # within it the larger size wins: a shorter plan, and fewer launches, the least certain costs of a profile

# Search: tree
CLOSE_FRACTION = 0.001  # relative gap to the lower bound at which the search stops
MAX_SEARCHED_OPS = 24_000  # budget of branch and bound: total ops of the simulated plans [search_2026-11-27]
MOST_RELAXED = 120  # relaxations after which families are not opened any more, once that budget is spent
FIRST_FAMILIES = 3  # that suggest the first policies; long plans exhaust the budget early [2026-11-26, first tries]
FIRST_BUFFERS = ((1, 2), (2, 2), (1, 1))  # prefetch depth, gradient slots

# Search: greedy policies
BUFFERS = ((2, 2), (1, 1))  # prefetch depth, gradient slots; the first that fit
MOST_LEAVING = 12  # micro-batches of a group that offloads saved activations: with more, one layer fills the slots and others wait
FEWER_LEAVING = (2, 4, 8)  # one layer in two, four or eight

# Search: climbs
MOST_CLIMBED_OPS = 120_000  # budget of all climbs, in ops of simulated plans [search_2026-11-27]
MOST_RESTARTED_OPS = 12_000  # budget of one climb in a restricted space [2026-11-27, moves that only five times]
CLIMBED_FRACTION = 0.002  # no climb starts within this relative gap to the lower bound
HOPELESS_FRACTION = 0.25  # a plan slower by more than this than that of another size is not climbed from
LEAST_GAIN_FRACTION = 1e-5  # minimum gain of a step, relative to the step time
REFILLED_STEPS = (1, 3, -1)  # slots to add or remove when memory is filled again
STEPS, SAVED_STEPS = (1, -1, 2, -2, 4), (1, -1, 2)  # slots to add or remove
EARLY_STEPS, EARLY_SHARES = (8, -8, 4, -4, 2, -2, 1, -1), (0.25, 0.5, 0.75)  # blocks to add or remove, and shares of all blocks
LEAVING_SHARES = (
    0.8,
    0.7,
    0.9,
)  # of the layers with offloaded activations [2026-11-27, moves that only five times]
MOVED = (1, 2, 4, 8)  # numbers of layers to change, in addition to all and half
