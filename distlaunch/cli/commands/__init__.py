"""The commands of distlaunch that no other launcher has: train, plan, render, backends, and those
for jobs that run or have ended."""
