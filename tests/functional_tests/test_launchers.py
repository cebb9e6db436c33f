"""Two torchrun launchers meet on one machine, as docs/guide/multi_node.md shows."""

import re
import socket
from pathlib import Path

from tests.launch import ROOT, printed, start

TRAIN = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1) + dist.get_rank()
dist.all_reduce(total)
print(f"{dist.get_world_size()} ranks, total {total.item()}")
dist.destroy_process_group()
"""


def test_the_two_launchers_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "guide" / "multi_node.md").read_text()
    (block,) = re.findall(r"```bash\n(for node in 0 1; do\n.*?)```", page, flags=re.DOTALL)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (tmp_path / "train.py").write_text(TRAIN)
    output = printed(start(["bash", "-c", block.replace("29500", str(port))], folder=tmp_path))
    assert output.count("2 ranks, total 3.0") == 2
