"""Write the planted model: make_planted_moe.py OUT.gguf"""

import sys
from pathlib import Path

from moe_proxy.files import replacing
from moe_proxy.model.planted import write_planted_moe

if len(sys.argv) != 2:
    sys.exit("usage: make_planted_moe.py OUT.gguf")
with replacing(Path(sys.argv[1])) as temporary:
    write_planted_moe(temporary)
