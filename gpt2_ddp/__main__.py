"""The scripts by their names, from any folder, where no clone is at hand.

gpt2-ddp train_gpt2 --data.path data/mine
accelerate launch -m gpt2_ddp train_gpt2 --config configs/gpt2_124m.yaml
torchrun --nproc_per_node 8 -m gpt2_ddp train_gpt2 --config configs/gpt2_124m.yaml
"""

import runpy
import sys

from gpt2_ddp.config.base import nearest
from gpt2_ddp.errors import UserError
from gpt2_ddp.project import PROJECT


def main() -> None:
    """Runs the script that the first word of the command line names, on the other words."""
    scripts = {file.stem: str(file) for file in sorted((PROJECT / "scripts").glob("*.py"))}
    name, *flags = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print("usage: gpt2-ddp SCRIPT [--help] ...\n\nscripts:", *scripts, sep="\n  ")
        print(f"\n--config takes configs/NAME.yaml, which are in {PROJECT / 'configs'}, from any folder")
        return
    if name not in scripts:
        print(f"error: {UserError('script', name, f'there is none{nearest(name, list(scripts))}')}", file=sys.stderr)
        sys.exit(2)
    sys.argv = [scripts[name], *flags]
    runpy.run_path(scripts[name], run_name="__main__")


if __name__ == "__main__":
    main()
