"""Stand-ins for libraries that run on GPUs alone: their signatures and checks, results by plain PyTorch.

Folders to be put on the path of a process that is to find the package installed.
"""

from pathlib import Path

TRANSFORMER_ENGINE = Path(__file__).with_name("transformer_engine_2_9")
APEX = Path(__file__).with_name("apex_0_1")
