"""The bars of the CPU, judged from the rows that benchmarks/cpu.py writes: what each asks and what was reached."""

import dataclasses

LEAST_VS_VLLM = {
    "dec_1x32k": 1.5,
    "dec": {"bf16": 2.0, "f32": 1.25, "fp8": 1.0},
    "pre": {"bf16": 1.7, "f32": 1.15},
    "mixed": 1.8,
}
"""vLLM's time over cpu_native's, by the longest prefix of a case's name, then by the type at its end."""
MOST_FOR_FEATURES = 1.15
MOST_FOR_WINDOW = 1.3
MOST_MS_FOR_WRITE = 0.2
FP8, ITS_BF16 = "dec_16x4k_p128_fp8", "dec_16x4k_p128_bf16"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One bar: `reached` against `must`, which is a floor or a ceiling."""

    bar: str
    reached: float
    must: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.reached >= self.must if self.at_least else self.reached <= self.must

    def __str__(self) -> str:
        sign, end = (">=" if self.at_least else "<="), "" if self.met else "  SHORT"
        return f"{self.bar:52} {self.reached:7.3f} {sign} {self.must:5.2f}{end}"


def against_vllm(name: str) -> float:
    """What this case must reach against vLLM."""
    found = LEAST_VS_VLLM[max((prefix for prefix in LEAST_VS_VLLM if name.startswith(prefix)), key=len)]
    return found if isinstance(found, float) else found[name.rsplit("_", 1)[1]]


def of_sdpa(name: str) -> float | None:
    """What pure XLA must reach of vLLM's speed; decode has a bar at pages of 64 and more."""
    if name.startswith("pre"):
        return 0.7
    return 0.75 if name.startswith("dec") and "_p128_" in name and name != FP8 else None


def judge(rows: list[dict]) -> list[Verdict]:
    """Every bar that these rows can answer, by medians."""
    vllm = {row["case"]: row["ratio_to_native"] for row in rows if row["backend"] == "vllm"}
    verdicts = [Verdict(f"{case}: vLLM / cpu_native", ratio, against_vllm(case), True) for case, ratio in vllm.items()]
    own = {row["case"]: row["ms"] for row in rows if row["backend"] == "cpu_native" and "cost" not in row}
    if FP8 in own and ITS_BF16 in own:
        verdicts.append(Verdict(f"{FP8}: its bf16 time / its time", own[ITS_BF16] / own[FP8], 1.0, True))
    for row in rows:
        if row["backend"] == "sdpa" and row["case"] in vllm and (least := of_sdpa(row["case"])):
            reached = vllm[row["case"]] / row["ratio_to_native"]
            verdicts.append(Verdict(f"{row['case']}: vLLM / sdpa", reached, least, True))
        if "cost" in row and row["backend"] != row["base"]:
            most = MOST_FOR_WINDOW if row["base"].startswith("context") else MOST_FOR_FEATURES
            verdicts.append(Verdict(f"{row['case']}: {row['backend']} / {row['base']}", row["cost"], most, False))
        if row["case"].startswith("write_") and row["backend"] == "cpu_native":
            verdicts.append(Verdict(f"{row['case']}: ms", row["ms"], MOST_MS_FOR_WRITE, False))
            verdicts.append(Verdict(f"{row['case']}: temporaries, MiB", row["temp_mib"], 0.01, False))
    return verdicts
