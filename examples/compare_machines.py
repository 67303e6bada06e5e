"""Plan one model for several machines and print speed, interval, memory and price.

python compare_machines.py qwen2.5-7b rtx4090-server h100-sxm
"""

import sys

import penstock

MODEL, MACHINES = sys.argv[1], sys.argv[2:]


def main() -> None:
    for machine in MACHINES:
        try:
            planned = penstock.plan(MODEL, machine, seq_len=2048, batch_size=8)
        except penstock.PenstockError as error:  # for example: the model does not fit, with the smallest changes that would
            print(f"{machine}: {error}")
            continue
        predicted = planned.answer.claim.prediction
        interval = f"{predicted.p10_step_s:.3g} to {predicted.p90_step_s:.3g} s"
        memory = f"{predicted.host_peak_bytes / 1e9:.3g} GB of host memory"
        print(f"{machine}: {planned.tokens_per_s:,.0f} tokens/s, a step in {planned.step_s:.3g} s ({interval}), {memory}")
        rent = planned.profile.price.usd_per_hour
        if rent is not None:
            print(f"  {1e6 * rent.value / 3600 / planned.tokens_per_s:.3f} USD per million tokens, rented")
        proof = planned.certificate
        print(f"  no schedule is faster than {proof.policy_bound_s:.3g} s (gap {proof.gap_fraction:.1%})")


if __name__ == "__main__":
    main()
