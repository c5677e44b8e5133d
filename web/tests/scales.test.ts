import { describe, expect, it } from "vitest";
import { domainOf, floorAt, floorTicks, isPlaced, onAxis, place, ticks } from "../src/scales";
import type { Axis } from "../src/schema";

const axis = (more: Partial<Axis> = {}): Axis => ({ label: "", scale: "linear", domain: null, floors: false, states: false, names: null, ...more });

describe("limits", () => {
  it("are the axis' own where it has them", () => {
    expect(domainOf(axis({ domain: [0, 1] }), [5, 6])).toEqual([0, 1]);
  });
  it("leave out what has no place: missing, not finite, at or below zero on a log axis", () => {
    expect(domainOf(axis({ scale: "log" }), [null, NaN, Infinity, 0, -3, 1, 100])).toEqual([0.8, 125]);
  });
  it("have a margin, and zero where the figures begin near it", () => {
    expect(domainOf(axis(), [0.1, 10])).toEqual([0, 10 + 0.06 * 9.9]);
    expect(domainOf(axis(), [3, 3])).toEqual([1.5, 4.5]);
    expect(domainOf(axis(), [])).toEqual([0, 1]);
  });
  it("are the first and last floor", () => {
    expect(domainOf(axis({ floors: true }), [0, 95])).toEqual([0, 95]);
    expect(domainOf(axis({ floors: true }), [0])).toEqual([0, 1]);
  });
});

describe("places", () => {
  it("are evenly spaced decades on a log axis", () => {
    const at = place([1, 10_000], [400, 0], "log");
    expect([1, 10, 100, 1000, 10_000].map(at).map(Math.round)).toEqual([400, 300, 200, 100, 0]);
    expect(at.invert(200)).toBeCloseTo(100, 6);
  });
  it("beyond the ends are those of the ends", () => {
    expect(place([0, 1], [0, 100], "linear")(7)).toBe(100);
  });
  it("are there for finite figures alone", () => {
    expect([isPlaced(0, "log"), isPlaced(0, "linear"), isPlaced(NaN, "linear"), isPlaced(null, "log"), isPlaced(2, "log")]).toEqual([false, true, false, false, true]);
  });
});

describe("ticks", () => {
  it("label every 12th of 96 floors and every 4th of 30", () => {
    expect(floorTicks(0, 95)).toEqual([0, 12, 24, 36, 48, 60, 72, 84]);
    expect(floorTicks(0, 29)).toEqual([0, 4, 8, 12, 16, 20, 24, 28]);
    expect(floorTicks(0, 0.5)).toEqual([0]);
  });
  it("are decades, or 1, 2, 5 within one", () => {
    expect(ticks(axis({ scale: "log" }), place([1, 1e6], [0, 1], "log"))).toEqual([1, 100, 10_000, 1e6]);
    expect(ticks(axis({ scale: "log" }), place([0.15, 0.7], [0, 1], "log"))).toEqual([0.2, 0.5]);
  });
  it("are round figures on a linear axis", () => {
    expect(ticks(axis(), place([0, 1], [0, 1], "linear"))).toEqual([0, 0.2, 0.4, 0.6, 0.8, 1]);
    expect(ticks(axis(), place([-1, 1], [0, 1], "linear"))).toEqual([-1, -0.5, 0, 0.5, 1]);
  });
});

describe("the shared floor", () => {
  it("is state k + 1 on an axis of states, and has no place before block 0 on one of blocks", () => {
    const blocks = axis({ floors: true });
    const states = axis({ floors: true, states: true });
    expect([onAxis(blocks, 5), onAxis(states, 5), onAxis(blocks, -1), onAxis(states, -1), onAxis(axis(), 5)]).toEqual([5, 6, null, 0, null]);
    for (const each of [blocks, states]) expect(floorAt(each, onAxis(each, 7) ?? NaN)).toBe(7);
  });
});
