"""Names of the files by which the launcher hands a run to its ranks."""

RUN_FILE = "run.yaml"
PLAN_FILE = "plan.json"
PREPARED_FILE = "prepared.json"
