"""What a person sees: pictures of schedules, timelines of real steps, progress of a run.

Nothing below imports this package, and nothing here imports torch.
"""
