"""Reference solutions to the prompts of ssd/prompts/humaneval.jsonl: with them the prompts' examples are run."""

from __future__ import annotations

import re
from collections import Counter


def longest_plateau(heights: list[int]) -> int:
    best = run = 0
    for i, height in enumerate(heights):
        run = run + 1 if i and heights[i - 1] == height else 1
        best = max(best, run)
    return best


def seat_label(index: int, seats_per_row: int) -> str:
    row, seat = divmod(index, seats_per_row)
    return f"{chr(ord('A') + row)}{seat + 1}"


def merge_shifts(shifts: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in sorted(shifts):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def minutes_between(start: str, end: str) -> int:
    first, last = (int(time[:2]) * 60 + int(time[3:]) for time in (start, end))
    return (last - first) % (24 * 60)


def mask_digits(number: str, visible: int) -> str:
    hidden = sum(c.isdigit() for c in number) - visible
    masked = ""
    for c in number:
        masked += "*" if c.isdigit() and hidden > 0 else c
        hidden -= c.isdigit()
    return masked


def undo_history(actions: list[str]) -> list[str]:
    kept: list[str] = []
    for action in actions:
        if action != "undo":
            kept.append(action)
        elif kept:
            kept.pop()
    return kept


def count_valleys(heights: list[int]) -> int:
    triples = zip(heights, heights[1:], heights[2:], strict=False)
    return sum(left > here < right for left, here, right in triples)


def initials(full_name: str) -> str:
    return "".join(f"{part[0].upper()}." for part in full_name.split())


def running_range(values: list[int]) -> list[int]:
    return [max(values[: i + 1]) - min(values[: i + 1]) for i in range(len(values))]


def expand_pages(selection: str) -> list[int]:
    pages: set[int] = set()
    for part in filter(None, selection.split(",")):
        first, _, last = part.partition("-")
        pages |= set(range(int(first), int(last or first) + 1))
    return sorted(pages)


def differ_by_one(first: str, second: str) -> bool:
    return len(first) == len(second) and sum(a != b for a, b in zip(first, second, strict=True)) == 1


def pad_columns(rows: list[list[int]], fill: int) -> list[list[int]]:
    width = max(map(len, rows), default=0)
    return [[row[i] if i < len(row) else fill for row in rows] for i in range(width)]


def camel_to_kebab(name: str) -> str:
    return "".join(f"-{c.lower()}" if c.isupper() and i else c.lower() for i, c in enumerate(name))


def leap_years_between(first: int, last: int) -> int:
    return sum(y % 4 == 0 and (y % 100 != 0 or y % 400 == 0) for y in range(first, last + 1))


def group_by_length(words: list[str]) -> dict[int, list[str]]:
    return {n: [w for w in words if len(w) == n] for n in sorted({len(w) for w in words})}


def weighted_mean(values: list[float], weights: list[float]) -> float | None:
    total = sum(weights)
    return sum(v * w for v, w in zip(values, weights, strict=True)) / total if total else None


def final_position(route: str) -> tuple[int, int]:
    x = y = 0
    for move in route.split():
        steps = int(move[1:])
        x += {"E": steps, "W": -steps}.get(move[0], 0)
        y += {"N": steps, "S": -steps}.get(move[0], 0)
    return x, y


def parse_duration(text: str) -> int:
    units = {"h": 3600, "m": 60, "s": 1}
    return sum(int(amount) * units[unit] for amount, unit in re.findall(r"(\d+)([hms])", text))


def track_time(seconds: int) -> str:
    minutes, rest = divmod(seconds, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02}"
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def podium(scores: dict[str, int], places: int) -> list[str]:
    return sorted(scores, key=lambda name: (-scores[name], name))[:places]


def swap_nibbles(byte: int) -> int:
    return (byte & 0x0F) << 4 | byte >> 4


def first_repeated(items: list[str]) -> str | None:
    seen: set[str] = set()
    for item in items:
        if item in seen:
            return item
        seen.add(item)
    return None


def fill_cups(capacities: list[int], water: int) -> list[int]:
    levels = []
    for capacity in capacities:
        levels.append(min(capacity, water))
        water -= levels[-1]
    return levels


def wrap_words(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def stock_changes(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in sorted(before | after)}
    return {name: change for name, change in changes.items() if change}


def fits_crossword(word: str, pattern: str) -> bool:
    if len(word) != len(pattern):
        return False
    return all(p in ("_", w) for w, p in zip(word.lower(), pattern.lower(), strict=True))


def zip_queues(left: list[str], right: list[str]) -> list[str]:
    n = min(len(left), len(right))
    pairs = [person for pair in zip(left[:n], right[:n], strict=True) for person in pair]
    return pairs + left[n:] + right[n:]


def multiply_polynomials(first: list[int], second: list[int]) -> list[int]:
    product = [0] * (len(first) + len(second) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            product[i + j] += a * b
    return product


def barcode_check_digit(digits: str) -> int:
    return -sum(int(d) * (3 if i % 2 else 1) for i, d in enumerate(digits)) % 10


def count_clusters(row: str) -> int:
    return sum(bool(group) for group in row.split("."))


def border_sum(grid: list[list[int]]) -> int:
    height, width = len(grid), len(grid[0])
    return sum(grid[y][x] for y in range(height) for x in range(width) if y in (0, height - 1) or x in (0, width - 1))


def round_to_step(price: int, step: int) -> int:
    return (2 * price + step) // (2 * step) * step


def pairs_score(dice: list[int]) -> int:
    return sum(die for die in dice if dice.count(die) > 1)


def split_bill(cents: int, guests: int) -> list[int]:
    share, rest = divmod(cents, guests)
    return [share + 1] * rest + [share] * (guests - rest)


def floors_travelled(start: int, stops: list[int]) -> int:
    return sum(abs(a - b) for a, b in zip([start, *stops], stops, strict=False))


Box = tuple[int, int, int, int]


def shared_area(first: Box, second: Box) -> int:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(width, 0) * max(height, 0)


def number_headings(levels: list[int]) -> list[str]:
    counters: list[int] = []
    numbers = []
    for level in levels:
        counters = [*counters, 0][:level]
        counters[-1] += 1
        numbers.append(".".join(map(str, counters)))
    return numbers


def election_winner(ballots: list[str]) -> str | None:
    ranking = Counter(ballots).most_common(2)
    if not ranking or (len(ranking) == 2 and ranking[0][1] == ranking[1][1]):
        return None
    return ranking[0][0]


def shorten(caption: str, limit: int) -> str:
    return caption if len(caption) <= limit else caption[: limit - 3].rstrip() + "..."


def watering_days(interval: int, first_day: int, month_length: int) -> list[int]:
    return list(range(first_day, month_length + 1, interval))
