"""The report in a real browser: scripts run, figures are drawn, the filter filters, nothing asks the network."""

import re
import shutil
import subprocess

import pytest
from example_records import every_record

from sqrtdk.report import write_report

pytestmark = pytest.mark.long
