"""The content of an export, gathered from the specializations before anything is written."""
