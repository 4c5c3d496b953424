"""The commands of distlaunch: train, plan, render, backends."""
