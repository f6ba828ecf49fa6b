"""The launcher on this machine: starts a plan, shows what the ranks print, and leaves nothing behind."""
