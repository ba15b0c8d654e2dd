"""Names of the files in a run folder by which the launcher hands a run to its ranks."""

RUN_FILE = "run.yaml"
PLAN_FILE = "plan.json"
PREPARED_FILE = "prepared.json"
