"""The processes of the job and their groups, as the runtime sees them: pipelines, stages, axes, replicas."""
