"""Facts -> Topology -> LaunchPlan, all pure: the same facts always give the same plan."""
