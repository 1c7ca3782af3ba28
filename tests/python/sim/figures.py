"""What the simulator's tests measured, from the properties they record."""

from collections import Counter


def summary(properties) -> str:
    """One line from (name, value) pairs; empty if there are none of ours."""
    total = Counter()
    missed = []
    for name, value in properties:
        if name == "sim_missed":
            missed.append(value)
        elif name.startswith("sim_"):
            total[name] += int(value)
    parts = []
    if launches := total["sim_launches"]:
        parts.append(
            f"{total['sim_alarms']} false alarms in {launches} launches of "
            f"{total['sim_kernels']} correct kernels "
            f"({launches // total['sim_kernels']} each: seeds x policies)"
        )
    if mutants := total["sim_mutants"]:
        caught = total["sim_caught"]
        parts.append(
            f"{caught} of {mutants} mutants caught "
            f"({100 * caught / mutants:.1f} %), "
            f"{total['sim_redundant']} more proven redundant"
        )
    if missed:
        parts.append("missed " + ", ".join(missed))
    return "simulator: " + "; ".join(parts) if parts else ""
