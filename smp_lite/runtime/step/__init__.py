"""One step on one process: what is planned of it, when it runs, what it leaves."""
