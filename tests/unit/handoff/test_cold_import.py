import subprocess
import sys

# Mode off runs these imports in every process; TransferQueue and Ray must stay out.
PROGRAM = """
import sys
import vime.data.payload, vime.data.columns, vime.handoff.group_store, vime.handoff.ticket
import vime.handoff.ledger, vime.handoff.audit
import vime.handoff.queue_view
loaded = {name.partition(".")[0] for name in sys.modules} & {"transfer_queue", "ray", "tensordict"}
sys.exit(f"loaded: {sorted(loaded)}" if loaded else 0)
"""


def test_mode_off_does_not_import_transfer_queue():
    answer = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
