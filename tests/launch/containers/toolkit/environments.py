"""Print what the real toolkit makes of the job in SAGEMAKER_BASE_DIR, as JSON."""

import json
import sys

from sagemaker_training.environment import Environment

environment = Environment()
json.dump({"variables": environment.to_env_vars(), "arguments": environment.to_cmd_args()}, sys.stdout)
