"""The embedded model: a small Llama that adds, trained by `jattn.embedded.train` with this project's own layers."""

from jattn.embedded.problems import Problem, few_shot, problems
from jattn.embedded.where import directory

__all__ = ["Problem", "directory", "few_shot", "problems"]
