"""Names of the files in a run folder by which the launcher hands a run to its ranks."""

RUN_FILE = "run.yaml"
PLAN_FILE = "plan.json"
PREPARED_FILE = "prepared.json"
DEEPSPEED_FILE = "deepspeed.json"  # ZeRO only: what DeepSpeed was started with, every "auto" filled in
