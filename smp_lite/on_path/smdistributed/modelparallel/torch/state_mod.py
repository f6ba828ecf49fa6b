from smp_lite.lifecycle.session_state import state

__all__ = ["state"]
