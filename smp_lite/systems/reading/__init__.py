"""Files and command lines, before anybody asks what their keys mean."""
