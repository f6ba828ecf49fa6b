from smp_lite.session_state import state

__all__ = ["state"]
