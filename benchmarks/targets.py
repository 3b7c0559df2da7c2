"""The targets of the CPU backends, judged from the rows of `benchmarks.cpu`: figures that a run must reach."""

import dataclasses

VLLM_OVER_NATIVE = {
    "dec_1x32k": 1.5,
    "dec": {"bf16": 2.0, "f32": 1.25, "fp8": 1.0},
    "pre": {"bf16": 1.7, "f32": 1.15},
    "mixed": 1.8,
}
"""At least: vLLM's time over cpu_native's, by the longest prefix of a case's name, then by the dtype at its end."""
FEATURE_COST = 1.15
WINDOW_COST = 1.3
WRITE_MS = 0.2
WRITE_TEMP_MIB = 0.01
FP8, FP8_AS_BF16 = "dec_16x4k_p128_fp8", "dec_16x4k_p128_bf16"


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One figure and its target, which is a lower limit if `at_least`, else an upper one."""

    figure: str
    measured: float
    target: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.measured >= self.target if self.at_least else self.measured <= self.target

    def __str__(self) -> str:
        sign, end = (">=" if self.at_least else "<="), "" if self.met else "  MISSED"
        return f"{self.figure:52} {self.measured:7.3f} {sign} {self.target:5.2f}{end}"


def vllm_over_native(case: str) -> float:
    """The least ratio of vLLM's time to cpu_native's in this case."""
    found = VLLM_OVER_NATIVE[max((prefix for prefix in VLLM_OVER_NATIVE if case.startswith(prefix)), key=len)]
    return found if isinstance(found, float) else found[case.rsplit("_", 1)[1]]


def vllm_over_sdpa(case: str) -> float | None:
    """The least ratio of vLLM's time to that of sdpa; None: no target. Decode has one at pages of 128 only."""
    if case.startswith("pre"):
        return 0.7
    return 0.75 if case.startswith("dec") and "_p128_" in case and case != FP8 else None


def judge(rows: list[dict]) -> list[Verdict]:
    """Every target that these rows can answer, by medians."""
    vllm = {row["case"]: row["ratio_to_native"] for row in rows if row["backend"] == "vllm"}
    verdicts = [
        Verdict(f"{case}: vLLM / cpu_native", ratio, vllm_over_native(case), True) for case, ratio in vllm.items()
    ]
    native_ms = {row["case"]: row["ms"] for row in rows if row["backend"] == "cpu_native" and "cost" not in row}
    if FP8 in native_ms and FP8_AS_BF16 in native_ms:
        speedup = native_ms[FP8_AS_BF16] / native_ms[FP8]
        verdicts.append(Verdict(f"{FP8}: its bf16 time / its time", speedup, 1.0, True))
    for row in rows:
        if row["backend"] == "sdpa" and row["case"] in vllm and (least := vllm_over_sdpa(row["case"])):
            ratio = vllm[row["case"]] / row["ratio_to_native"]
            verdicts.append(Verdict(f"{row['case']}: vLLM / sdpa", ratio, least, True))
        if "cost" in row and row["variant"] != row["base"]:
            most = WINDOW_COST if row["base"].startswith("context") else FEATURE_COST
            verdicts.append(Verdict(f"{row['case']}: {row['variant']} / {row['base']}", row["cost"], most, False))
        if row["case"].startswith("write_") and row["backend"] == "cpu_native":
            verdicts.append(Verdict(f"{row['case']}: ms", row["ms"], WRITE_MS, False))
            verdicts.append(Verdict(f"{row['case']}: temporaries, MiB", row["temp_mib"], WRITE_TEMP_MIB, False))
    return verdicts
