"""Attribution of GPU operations to layers, phases and steps: ranges, launches and how they join."""
