from hypothesis import HealthCheck, settings

# How long an example takes says something about the machine, not about the property.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
